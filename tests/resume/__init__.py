"""The proof that a training job resumes under another strategy, and the page that shows it."""
