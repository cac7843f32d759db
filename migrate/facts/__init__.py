"""What a training program is made of and does: one subject a file.

`program` has what everything else builds on. Facts are places in the original text; what should be
there is a rule's business.
"""
