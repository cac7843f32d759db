"""Records what a process writes, and keeps it from writing outside the copy that it runs on.

The copy has links to the user's large files. A script that writes to one is given a file of its
own in the link's place first.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import multiprocessing.util
import os
import shlex
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from migrate.runner import native
from migrate.runner.places import DEVICES, Place, Places

WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
READING_MODES = frozenset(("r", "rb", "rt"))
LISTED_ACTIONS = frozenset(("make", "remove", "rename", "write"))


class _Act(NamedTuple):
    """Something done to a path, which may be relative to an open folder.

    `content` says what becomes of the file that a link leads to: "kept" or "replaced"; empty where
    it is the path itself that is made, moved or removed.
    """

    action: str
    path: Any
    folder: int | None = -1
    content: str = ""


def _opening(path: Any, mode: str | None, flags: int) -> Sequence[_Act]:
    if mode is None:
        writes, fresh, exclusive = flags & WRITING_FLAGS, flags & os.O_TRUNC, flags & os.O_EXCL
    else:
        writes = any(letter in mode for letter in "wax+")
        fresh, exclusive = "w" in mode, "x" in mode
    if not writes:
        return ()
    content = "" if exclusive else "replaced" if fresh else "kept"
    return (_Act("write", path, content=content),)


def _connecting(database: Any, *_: Any) -> Sequence[_Act]:
    """Of sqlite3: a path, a URI, or a name for a database in memory."""
    path = os.fsdecode(database)
    if path.startswith("file:"):
        uri = urlsplit(path)
        options = parse_qs(uri.query)
        reads = options.get("mode") in (["ro"], ["memory"]) or "immutable" in options
        path = "" if reads else unquote(uri.path)
    return () if path in ("", ":memory:") else (_Act("write", path, -1, "kept"),)


def _change(path: Any, folder: int | None = -1) -> Sequence[_Act]:
    return (_Act("change", path, folder, "kept"),)


ACTS: Mapping[str, Callable[..., Sequence[_Act]]] = {
    "open": _opening,
    "sqlite3.connect": _connecting,
    "os.mkdir": lambda path, mode, folder: (_Act("make", path, folder),),
    "os.remove": lambda path, folder: (_Act("remove", path, folder),),
    "os.rmdir": lambda path, folder: (_Act("remove", path, folder),),
    "shutil.rmtree": lambda path, folder=-1: (_Act("remove", path, folder),),
    "os.rename": lambda old, new, old_folder, new_folder: (
        _Act("rename", old, old_folder),
        _Act("write", new, new_folder),
    ),
    # Without this, a whole folder would be copied before its removal is refused.
    "shutil.move": lambda old, new: (_Act("rename", old),),
    # A write to the second name is a write to the first.
    "os.link": lambda old, new, old_folder, new_folder: (
        *_change(old, old_folder),
        _Act("write", new, new_folder),
    ),
    "os.symlink": lambda old, new, folder: (_Act("write", new, folder),),
    "os.truncate": lambda path, length: (_Act("write", path, -1, "kept"),),
    "os.chmod": lambda path, mode, folder: _change(path, folder),
    "os.chown": lambda path, user, group, folder: _change(path, folder),
    "os.chflags": lambda path, flags: _change(path),
    "os.utime": lambda path, times, ns, folder: _change(path, folder),
    "os.setxattr": lambda path, *_: _change(path),
    "os.removexattr": lambda path, *_: _change(path),
}
COMMANDS: Mapping[str, Callable[..., Any]] = {
    "os.system": lambda command: command,
    "os.exec": lambda path, words, environment: words,
    "os.posix_spawn": lambda path, words, environment: words,
    "pty.spawn": lambda words: words,
    "subprocess.Popen": lambda program, words, folder, environment: words,
}
"""What the arguments of each event that starts another program say of it."""
EVENTS = frozenset((*ACTS, *COMMANDS))


class Files:
    """The files of this process below `root`, and the guard of everything else.

    `allow` are folders that it may write to as well, `record` is the runner's own, and `protect`
    are the user's folders, which stay untouched also where all may write.
    """

    def __init__(
        self,
        root: Path,
        allow: Sequence[Path] = (),
        record: Path | None = None,
        protect: Sequence[Path] = (),
    ) -> None:
        self._root = Path(os.path.realpath(root))
        own = (self._root, *([record] if record else []))
        self._places = Places(own, allow, protect)
        self._seen: dict[tuple[str, str], None] = {}
        self._outside: dict[tuple[str, str], None] = {}
        self._refused: dict[tuple[str, str], None] = {}
        self._replacing = threading.local()

    def watch(self) -> None:
        """Start; Python cannot take an audit hook away again."""
        native.watch(lambda path, mode: self._hear("open", (path, mode, 0)))
        self._watch_spawning()
        sys.addaudithook(self._hear)

    def listed(self) -> list[tuple[str, str]]:
        """(action, path) in the order of their first appearance, paths relative to the root.

        Actions are write, make, rename and remove.
        """
        return list(self._seen)

    def outside(self) -> list[tuple[str, str]]:
        """(action, absolute path) of what was allowed in caches and in the user's own choice.

        ("run", command) stands for another program, which nobody watches.
        """
        return list(self._outside)

    def refused(self) -> list[tuple[str, str]]:
        """(action, absolute path) of what the script was kept from; it may have gone on."""
        return list(self._refused)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in EVENTS or (event == "open" and args[1] in READING_MODES):
            return  # nearly always
        refusal = None
        with contextlib.suppress(OSError, TypeError, ValueError):
            # Those are of no path at all, or of one that cannot be: the call itself will say so.
            if event in COMMANDS:
                self._note_command(COMMANDS[event](*args))
            else:
                refusal = self._answer(ACTS[event](*args))
        if refusal is not None:
            raise PermissionError(errno.EACCES, *refusal)

    def _answer(self, acts: Sequence[_Act]) -> tuple[str, str] | None:
        """Why one of them is refused, and for which path."""
        if not acts or getattr(self._replacing, "now", False):
            return None
        return next(filter(None, map(self._judge, acts)), None)

    def _judge(self, act: _Act) -> tuple[str, str] | None:
        place = _place(act.path, act.folder)
        if place is None or (act.action == "write" and act.content and place.is_dir()):
            return None  # a folder cannot be opened for writing: a temporary file in it is meant
        target = place
        if act.content and place.is_symlink():
            target = Path(os.path.realpath(place))
            if self._is_to_be_replaced(place, target):
                problem = self._replace(place, target, act.content)
                if problem:
                    return problem, str(place)
                target = place
        if self._is_own(target):
            self._note(act.action, place if self._is_own(place) else target)
            return None
        return self._judge_outside(act.action, target)

    def _judge_outside(self, action: str, target: Path) -> tuple[str, str] | None:
        if os.path.lexists(target) == (action == "make") and action != "write":
            return None  # there already, or not there to be removed: nothing changes
        place, entry = self._places.of(target), (action, str(target))
        is_on_the_way = action == "make" and self._places.lead_below(target)
        if place is Place.REFUSED and not is_on_the_way:
            if "__pycache__" not in target.parts:
                self._refused.setdefault(entry)
            return _refusal(target if action == "make" else target.parent), str(target)
        if place not in (Place.OWN, Place.PASSING):
            self._outside.setdefault(entry)
        return None

    def _is_own(self, path: Path) -> bool:
        return path == self._root or self._root in path.parents

    def _is_to_be_replaced(self, place: Path, target: Path) -> bool:
        """A link in the copy to somebody else's file."""
        if not self._is_own(place) or self._is_own(target) or target.is_dir():
            return False
        is_device = str(target).startswith(DEVICES)
        return not is_device and self._places.of(target) is not Place.GIVEN

    def _replace(self, link: Path, target: Path, content: str) -> str:
        """Put a file of the script's own in place of the link, empty or a copy; what went wrong."""
        copy = link.with_name(f".{link.name}.{os.getpid()}")
        self._replacing.now = True
        try:
            if not target.exists():
                link.unlink(missing_ok=True)
                return ""
            copy.touch()
            if content == "kept":
                shutil.copyfile(target, copy)
            copy.chmod(stat.S_IMODE(target.stat().st_mode) | stat.S_IRUSR | stat.S_IWUSR)
            copy.replace(link)
        except OSError as error:
            copy.unlink(missing_ok=True)
            return (
                f"migrate verify runs the script on a copy, and {target} could not be copied for "
                f"it to change ({error.strerror}); pass an argument that names another file"
            )
        finally:
            self._replacing.now = False
        return ""

    def _note(self, action: str, path: Path) -> None:
        is_listed = action in LISTED_ACTIONS and path != self._root
        if is_listed and "__pycache__" not in path.parts:
            self._seen.setdefault((action, str(path.relative_to(self._root))))

    def _note_command(self, command: Any) -> None:
        if isinstance(command, Iterable) and not isinstance(command, str | bytes):
            words = [os.fsdecode(word) for word in command]
            is_shell = len(words) > 2 and words[1] == "-c" and words[0].endswith("/sh")
            command = words[2] if is_shell else shlex.join(words)
        self._outside.setdefault(("run", os.fsdecode(command)))

    def _watch_spawning(self) -> None:
        """Python raises no event for the processes that its multiprocessing starts anew."""
        util: Any = multiprocessing.util
        spawn = util.spawnv_passfds

        @functools.wraps(spawn)
        def spawn_and_note(path: Any, args: Any, passfds: Any) -> Any:
            if not any("resource_tracker" in os.fsdecode(word) for word in args):
                self._note_command(args)
            return spawn(path, args, passfds)

        util.spawnv_passfds = spawn_and_note


def _place(path: Any, folder: int | None) -> Path | None:
    """Where a name is, links of its parents resolved; None for descriptors and devices.

    ".." is taken as the system takes it: from where a link leads to.
    """
    if not isinstance(path, str | bytes | os.PathLike):
        return None
    absolute = Path(os.fsdecode(path))
    if not absolute.is_absolute():
        absolute = (Path.cwd() if folder is None or folder < 0 else _folder(folder)) / absolute
    if str(absolute).startswith(DEVICES) and ".." not in absolute.parts:
        return None
    if absolute.name in ("", ".."):
        return Path(os.path.realpath(absolute))
    return Path(os.path.realpath(absolute.parent)) / absolute.name


def _folder(descriptor: int) -> Path:
    if sys.platform == "darwin":
        import fcntl

        name = fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024))
        return Path(os.fsdecode(name.rstrip(b"\0")))
    return Path(f"/proc/self/fd/{descriptor}").readlink()


def _refusal(folder: Path) -> str:
    return (
        "migrate verify runs the script on a copy and does not write outside it; pass an argument "
        f"that puts output below the script's folder, or --allow-write {folder}"
    )
