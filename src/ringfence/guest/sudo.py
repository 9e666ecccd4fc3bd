"""`sudo` inside a sandbox that has a root: asks the agent, since set-id programs are dead here.

It is a courtesy, not a wall: in such a sandbox the user may become root as on any machine with passwordless sudo,
and what holds root is around the sandbox. The command gets this process's working directory, its standard streams
(as descriptors, or through a terminal of its own where this process has one), the environment that sudo(8) lets
through, and the signals that this process gets; its exit code becomes ours. Called by root, it needs nobody.

Run by the sandbox's interpreter in isolated mode. Standard library only; starts in every call, so imports are few.
Facts: sudo(8), sudoers(5) (env_reset, secure_path, use_pty).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys

ADDRESS = "\0ringfence-sudo"  # abstract: in the sandbox's own network namespace, and taken before user code runs
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MAXIMUM_REQUEST = 2 << 20  # bytes of arguments and environment together
LENGTH = struct.Struct("!I")
KEPT = ("TERM", "COLORTERM", "COLORS", "LS_COLORS", "DISPLAY", "XAUTHORITY", "LANG", "LANGUAGE", "TZ", "DEBIAN_FRONTEND",
        "LD_LIBRARY_PATH", "PIP_DISABLE_PIP_VERSION_CHECK")  # fmt: skip
_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM,
            signal.SIGCONT, signal.SIGTSTP)  # fmt: skip
_TIOCGWINSZ, _TIOCSWINSZ = 0x5413, 0x5414
_USAGE = "usage: sudo [-AbEHnPS] [-u user] [-g group] [-D directory] [-i | -s] [VAR=value] [--] command [arguments]\n"


class Problem(Exception):
    """What is wrong, in words; sudo then ends with 1."""


class Options:
    """The command line of sudo, parsed."""

    def __init__(self) -> None:
        self.user = "root"
        self.group = ""
        self.directory = ""
        self.login = self.shell = self.background = False
        self.preserve = False
        self.preserved: list[str] = []
        self.only = ""  # list, validate, forget, version, help
        self.variables: dict[str, str] = {}
        self.command: list[str] = []


_FLAGS = {
    "A": "askpass", "b": "background", "E": "preserve-env", "H": "set-home", "h": "help", "i": "login", "K": "remove-timestamp",
    "k": "reset-timestamp", "l": "list", "n": "non-interactive", "P": "preserve-groups", "S": "stdin", "s": "shell",
    "V": "version", "v": "validate", "B": "bell",
}  # fmt: skip
_VALUES = {"u": "user", "g": "group", "p": "prompt", "D": "chdir", "C": "close-from", "T": "command-timeout", "U": "other-user"}


def parse(arguments: list[str]) -> Options:
    """The options of a command line without its first word. Raises Problem."""
    options = Options()
    rest = list(arguments)
    while rest:
        word = rest[0]
        if word == "--":
            rest.pop(0)
            break
        if word.startswith("--"):
            rest.pop(0)
            name, equals, value = word[2:].partition("=")
            if name == "preserve-env" and equals:
                options.preserved += value.split(",")
            elif name in _VALUES.values():
                if not equals and not rest:
                    raise Problem(f"option --{name} needs a value")
                _take(options, name, value if equals else rest.pop(0))
            elif name in _FLAGS.values() and not equals:
                _set(options, name)
            else:
                raise Problem(f"unknown option {word}")
        elif word.startswith("-") and len(word) > 1:
            rest.pop(0)
            letters = word[1:]
            while letters:
                letter, letters = letters[0], letters[1:]
                if letter in _VALUES:
                    if not letters and not rest:
                        raise Problem(f"option -{letter} needs a value")
                    _take(options, _VALUES[letter], letters or rest.pop(0))
                    break
                if letter not in _FLAGS:
                    raise Problem(f"unknown option -{letter}")
                _set(options, _FLAGS[letter])
        elif "=" in word and word.partition("=")[0].isidentifier():
            rest.pop(0)
            name, _, value = word.partition("=")
            options.variables[name] = value
        else:
            break
    while rest and not options.command and "=" in rest[0] and rest[0].partition("=")[0].isidentifier():
        name, _, value = rest.pop(0).partition("=")
        options.variables[name] = value
    options.command = rest
    return options


def _set(options: Options, name: str) -> None:
    if name == "login":
        options.login = True
    elif name == "shell":
        options.shell = True
    elif name == "background":
        options.background = True
    elif name == "preserve-env":
        options.preserve = True
    elif name in ("list", "validate", "version", "help", "remove-timestamp", "reset-timestamp"):
        options.only = name


def _take(options: Options, name: str, value: str) -> None:
    if name == "user":
        options.user = value
    elif name == "group":
        options.group = value
    elif name == "chdir":
        options.directory = value


class Target:
    """The account that a command is to run as."""

    def __init__(self, options: Options) -> None:
        import pwd

        name = options.user
        try:
            entry = pwd.getpwuid(int(name[1:])) if name.startswith("#") and name[1:].isdigit() else pwd.getpwnam(name)
            self.name, self.uid, self.gid, self.home, self.shell = (
                entry.pw_name, entry.pw_uid, entry.pw_gid, entry.pw_dir, entry.pw_shell or "/bin/sh",
            )  # fmt: skip
        except KeyError:
            if not (name.startswith("#") and name[1:].isdigit()):
                raise Problem(f"unknown user {name}") from None
            self.name, self.uid, self.gid, self.home, self.shell = name, int(name[1:]), int(name[1:]), "/", "/bin/sh"
        if options.group:
            import grp

            group = options.group
            try:
                self.gid = int(group[1:]) if group.startswith("#") and group[1:].isdigit() else grp.getgrnam(group).gr_gid
            except KeyError:
                raise Problem(f"unknown group {group}") from None
        try:
            self.groups = os.getgrouplist(self.name, self.gid)
        except OSError:
            self.groups = [self.gid]


def environment(options: Options, target: Target, argv: list[str]) -> dict[str, str]:
    """What sudoers(5) calls env_reset, with secure_path: the command's environment."""
    own = dict(os.environ)
    if options.preserve:
        env = own
    else:
        env = {name: own[name] for name in own if name in KEPT or name.startswith("LC_") or name in options.preserved}
    if "PATH" not in options.preserved:
        # The template's own programs come first, as for the user: `sudo python` is the Python that runs the code.
        first = [item for item in own.get("PATH", "").split(":") if item.startswith("/opt/")]
        env["PATH"] = ":".join(dict.fromkeys([*first, *PATH.split(":")]))
    if not options.preserve or options.login or "HOME" not in env:
        env["HOME"] = target.home
    env.update({
        "USER": target.name, "LOGNAME": target.name, "SHELL": target.shell, "MAIL": "/var/mail/" + target.name,
        "SUDO_COMMAND": " ".join(argv)[:4096], "SUDO_USER": _own_name(), "SUDO_UID": str(os.getuid()),
        "SUDO_GID": str(os.getgid()),
    })  # fmt: skip
    env.setdefault("TERM", "unknown")
    if target.uid == 0 and not os.isatty(0):
        env.setdefault("DEBIAN_FRONTEND", "noninteractive")
    env.update(options.variables)
    return env


def _own_name() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def command(options: Options, target: Target) -> list[str]:
    """The argv to run; a shell's is quoted as sudo does."""
    if not (options.login or options.shell):
        return options.command
    shell = target.shell if options.login else os.environ.get("SHELL") or target.shell
    if not options.command:
        return [shell] if not options.login else [shell, "-l"]
    text = " ".join(
        "".join(each if each.isalnum() or each in "_-$" else "\\" + each for each in word) for word in options.command
    )
    return [shell, *(["-l"] if options.login else []), "-c", text]


def main(argv: list[str]) -> int:
    """Entry of the program: the exit code."""
    try:
        options = parse(argv[1:])
        if options.only and not (options.only in ("reset-timestamp", "list") and options.command):
            return _answer(options.only)
        if options.only == "list":
            options.command = ["/bin/sh", "-c", 'command -v -- "$1"', "sh", options.command[0]]
        if not options.command and not (options.login or options.shell):
            sys.stderr.write(_USAGE)
            return 1
        target = Target(options)
        words = command(options, target)
        request = {
            "argv": words, "env": list(environment(options, target, words).items()),
            "uid": target.uid, "gid": target.gid, "groups": target.groups,
            "cwd": options.directory or (target.home if options.login else ""), "background": options.background,
        }
        if os.geteuid() == 0:
            return _become(words, environment(options, target, words), target, request["cwd"])
        return Client(request, words[0]).run()
    except Problem as problem:
        sys.stderr.write(f"sudo: {problem}\n")
        return 1


def _answer(only: str) -> int:
    if only == "help":
        sys.stdout.write(_USAGE)
    elif only == "version":
        sys.stdout.write("Sudo: the client of Ringfence's agent, with the usual options\n")
    elif only == "list":
        sys.stdout.write(f"User {_own_name()} may run the following commands on {os.uname().nodename}:\n    (ALL : ALL) NOPASSWD: ALL\n")
    return 0


def _become(argv: list[str], env: dict[str, str], target: Target, directory: str) -> int:
    """Root needs no help: it has the capabilities to change its ids itself."""
    try:
        if directory:
            os.chdir(directory)
        os.setgroups(target.groups)
        os.setresgid(target.gid, target.gid, target.gid)
        os.setresuid(target.uid, target.uid, target.uid)
    except OSError as error:
        raise Problem(f"cannot become {target.name}: {error.strerror}") from None
    try:
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        raise Problem(_why(argv[0], error.errno or errno.EINVAL)) from None


def _why(name: str, number: int) -> str:
    return f"{name}: command not found" if number == errno.ENOENT and "/" not in name else f"{name}: {os.strerror(number)}"


class Client:
    """One command that the agent runs for us."""

    def __init__(self, request: dict, name: str) -> None:
        self.name = name
        self.terminals = [number for number in (0, 1, 2) if _is_terminal(number)]
        if self.terminals:
            request["terminals"] = self.terminals
            request["size"] = fcntl.ioctl(self.terminals[0], _TIOCGWINSZ, bytes(8)).hex()
        raw = json.dumps(request).encode()
        if len(raw) > MAXIMUM_REQUEST:
            raise Problem("the arguments and the environment are too long")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.socket.connect(ADDRESS)
        except OSError as error:
            raise Problem(f"the sandbox's agent does not answer: {error.strerror}") from None
        directory = os.open(".", os.O_PATH | os.O_DIRECTORY)
        null = os.open("/dev/null", os.O_RDWR)
        streams = [number if _is_open(number) else null for number in (0, 1, 2)]
        socket.send_fds(self.socket, [LENGTH.pack(len(raw))], [*streams, directory])
        self.socket.sendall(raw)
        os.close(directory)
        os.close(null)
        self.master = -1
        self.saved: list | None = None
        self.unread = b""

    def run(self) -> int:
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        for number in (*_SIGNALS, signal.SIGWINCH):
            if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGINT:
                signal.signal(number, lambda number, frame: None)
        try:
            return self._relay(wake)
        finally:
            self._cooked()

    def _relay(self, wake: int) -> int:
        code: int | None = None
        listening = True
        to_screen = next((number for number in (1, 2, 0) if number in self.terminals), -1)
        while code is None or self.master >= 0:
            watched = [wake] if code is None else []
            if code is None:
                watched.append(self.socket.fileno())
            if self.master >= 0:
                watched.append(self.master)
                if listening and code is None and 0 in self.terminals:
                    watched.append(0)
            ready = select.select(watched, [], [], None if code is None else 0.2)[0]
            if code is not None and not ready:
                break  # a background process keeps the terminal open: the command is over
            if wake in ready:
                for number in os.read(wake, 512):
                    self._pass_on(number)
            if self.master in ready and self.master >= 0:
                data = _read(self.master)
                if data:
                    _write(to_screen, data)
                else:
                    os.close(self.master)
                    self.master = -1
            if 0 in ready:
                data = _read(0)
                _write(self.master, data or b"\x04")
                listening = bool(data)
            if code is None and self.socket.fileno() in ready:
                code = self._hear()
        return code

    def _pass_on(self, number: int) -> None:
        if number == signal.SIGWINCH:
            if self.master >= 0:
                try:
                    fcntl.ioctl(self.master, _TIOCSWINSZ, fcntl.ioctl(self.terminals[0], _TIOCGWINSZ, bytes(8)))
                except OSError:
                    pass
            return
        try:
            self.socket.sendall(bytes([number]))
        except OSError:
            pass
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)

    def _hear(self) -> int | None:
        data, descriptors, _, _ = socket.recv_fds(self.socket, 4096, 1)
        if descriptors:
            self.master = descriptors[0]
            os.set_inheritable(self.master, False)
            self._raw()
        if not data:
            raise Problem("the sandbox's agent ended the command")
        self.unread += data
        while b"\n" in self.unread:
            line, self.unread = self.unread.split(b"\n", 1)
            if not line:
                continue  # what came with the terminal
            message = json.loads(line)
            if "refused" in message:
                raise Problem(message["refused"])
            if "failed" in message:
                self._cooked()
                raise Problem(_why(self.name, message["failed"]))
            if "over" in message:
                return self._end(message["over"])
        return None

    def _end(self, status: int) -> int:
        if os.WIFSIGNALED(status):
            # As if the command had been ours: whoever waits for us sees the same death.
            number = os.WTERMSIG(status)
            self._cooked()
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return 128 + number
        return os.WEXITSTATUS(status)

    def _raw(self) -> None:
        import termios
        import tty

        if 0 in self.terminals:
            self.saved = termios.tcgetattr(0)
            tty.setraw(0)

    def _cooked(self) -> None:
        if self.saved is not None:
            import termios

            termios.tcsetattr(0, termios.TCSADRAIN, self.saved)
            self.saved = None


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 64 << 10)
    except OSError:  # EIO: the last process has closed the terminal
        return b""


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view and descriptor >= 0:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
        except OSError:
            return


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
        return True
    except OSError:
        return False


def _is_terminal(descriptor: int) -> bool:
    try:
        return os.isatty(descriptor)
    except OSError:
        return False
