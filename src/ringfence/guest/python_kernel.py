"""The Python leaf of the kernel: an IPython shell without terminal, history database, threads or files.

`warm()` builds it in the zygote and runs a few cells through the path that children take; `start()` binds it to a
forked child. It keeps what a Jupyter user knows (magics, `!cmd`, top-level await, `_`, `In`/`Out`, rich tracebacks,
`?`, display) and guards against what a cell may do to it: exceptions and representations that raise or never end,
figures left open, builtins deleted, a cancelled await that would go on in the next cell.

Where it differs from Jupyter, and why:
  - `!cmd` and `%%bash` write straight to fd 1 and 2 (no pty, no thread), and an interrupt ends the cell, not only the
    command. Under `%%capture` or `redirect_stdout` their output goes where `sys.stdout` points.
  - every figure comes out exactly once, also after `display(figure)` and with any matplotlib backend.
  - a representation that raises leaves its traceback on stderr and does not make the cell an error.
  - between cells the event loop runs when tasks are pending; while a plain cell runs it does not, so `asyncio.run`
    works in a cell without top-level await.

IPython 8.18 (Python 3.9) and 9.x are supported; both are in the tests.
"""


# ruff: noqa: BLE001, S110  (exceptions of any kind come out of user code, and end here on purpose)
from __future__ import annotations

import builtins
import gc
import getpass
import linecache
import os
import re
import signal
import subprocess
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import IPython
from IPython.core import interactiveshell as _interactiveshell
from IPython.core.autocall import ExitAutocall, IPyAutocall
from IPython.core.display_functions import display
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import StdinNotImplementedError, UsageError
from IPython.core.formatters import DisplayFormatter
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.macro import Macro
from IPython.core.magic import cell_magic, magics_class
from IPython.core.magics.script import ScriptMagics
from IPython.core.profiledir import ProfileDir
from IPython.lib import pretty
from IPython.utils.text import LSString, SList
from traitlets import Type, default, observe
from traitlets.config import Config

from ringfence.guest import kernel, rich_results
from ringfence.guest.kernel import Outcome, Request

_ORIGINAL_BUILTINS = dict(vars(builtins))
__builtins__ = dict(_ORIGINAL_BUILTINS)  # see kernel.py

INLINE_BACKEND = "module://matplotlib_inline.backend_inline"

VALUE_LIMIT = 64 * 1024
"""Characters of an exception's text that are sent."""

TRACEBACK_LIMIT = 256 * 1024
"""Characters of a traceback that are sent; of a longer one the beginning and the end."""

MAX_FRAMES = 40

_INTERNAL = (os.path.dirname(os.path.abspath(IPython.__file__)) + os.sep,
             os.path.dirname(os.path.abspath(__file__)) + os.sep)

_PLAIN_TYPES = (int, float, bool, str, bytes, complex, type(None))

# What the input transformers could touch. A cell without any of it passes through them unchanged, and is not tokenized.
_MAYBE_SPECIAL = re.compile(r"[%!?\r\f]|^[ \t]*(?:[,;/]|>>>|\.\.\.|In ?\[)|\A\s", re.MULTILINE)
_FIRST_WORD = re.compile(r"[^\W\d]\w*")

_INPUT_HINT = "cells have no keyboard: pass the value in a variable, or run the program with commands.run(stdin=True)"


def _no_input(prompt: object = "") -> str:
    """input() in a sandbox: nobody is there to answer."""
    __tracebackhide__ = True  # the traceback ends at the line of the cell
    raise StdinNotImplementedError("input() is not available here; " + _INPUT_HINT)


def _no_getpass(prompt: str = "Password: ", stream: Any = None, **options: Any) -> str:
    """getpass() in a sandbox: nobody is there to answer."""
    __tracebackhide__ = True
    raise StdinNotImplementedError("getpass() is not available here; " + _INPUT_HINT)


def _no_breakpoint(*arguments: Any, **options: Any) -> None:
    """breakpoint() in a sandbox: nobody is there to type commands."""
    __tracebackhide__ = True
    if os.environ.get("PYTHONBREAKPOINT") != "0":
        raise StdinNotImplementedError("breakpoint() is not available here; print the values, or look at them in the "
                                       "next cell: variables of the cell are kept")


_no_input.__name__ = _no_input.__qualname__ = "input"
_no_getpass.__name__ = _no_getpass.__qualname__ = "getpass"


# ---------------------------------------------------------------------------------------------------------------------
# Pieces of the shell
# ---------------------------------------------------------------------------------------------------------------------

class _QuietProfile(ProfileDir):
    """A profile directory that nobody creates."""

    @observe("location")
    def _location_changed(self, change: Any) -> None:
        pass

    def check_dirs(self) -> None:
        pass


class _Exit(ExitAutocall):
    """`exit` and `quit`: the cell ends with SystemExit, the kernel lives."""

    rewrite = False

    def __call__(self, code: Any = None) -> None:
        raise SystemExit(code)


class _Formatter(DisplayFormatter):
    """Adds our MIME types, skips a dozen formatters for plain numbers and text, survives representations that raise."""

    depth = 0
    failed: str | None = None

    def format(self, obj: Any, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        kind = type(obj)
        if include is None and exclude is None and kind in _PLAIN_TYPES and self._is_untouched(kind):
            try:
                return {"text/plain": repr(obj)}, {}
            except ValueError:
                pass    # an int of more digits than repr allows; the slow path words it
        shell: Any = self.parent
        figure = rich_results.is_figure(obj)
        if figure and not shell.figure_is_new(obj):
            return {}, {}
        outer = self.failed
        self.failed = None
        self.depth += 1
        try:
            bundle, metadata = super().format(obj, include=include, exclude=exclude)
            if self.failed is not None and "text/plain" not in bundle:
                bundle["text/plain"] = f"<{kind.__name__} object; its representation raised {self.failed}>"
            if bundle:
                for mime, value, about in self._extras(obj, figure):
                    if mime not in bundle and not (include and mime not in include) and not (
                            exclude and mime in exclude):
                        bundle[mime] = value
                        if about:
                            metadata[mime] = about
        finally:
            self.depth -= 1
            self.failed = outer
        return bundle, metadata

    def _is_untouched(self, kind: type) -> bool:
        for mime, formatter in self.formatters.items():
            known = formatter.type_printers.get(kind)
            if known is not None and not (mime == "text/plain" and known in _DEFAULT_PRINTERS):
                return False
        return not (self.mimebundle_formatter.type_printers or self.ipython_display_formatter.type_printers)

    def _extras(self, obj: Any, figure: bool) -> list[tuple[str, Any, dict[str, Any]]]:
        extras: list[tuple[str, Any, dict[str, Any]]] = []
        try:
            if figure:
                chart = rich_results.chart_of_figure(obj)
                if chart:
                    extras.append((rich_results.CHART_MIME, chart, {}))
            elif type(obj) in (list, dict):
                plain = rich_results.json_of_collection(obj)
                if plain is not None:
                    extras.append(("application/json", plain, {}))
            elif rich_results.is_data_frame(obj):
                data, about = rich_results.data_of_frame(obj)
                extras.append((rich_results.DATA_MIME, data, about))
        except Exception as error:
            shell: Any = self.parent
            shell.write_error(f"[ringfence] no data for this {type(obj).__name__}: {type(error).__name__}: {rich_results.safe_text(error, 500)}\n")
        return extras


_DEFAULT_PRINTERS = tuple(pretty._type_pprinters.get(kind) for kind in _PLAIN_TYPES)  # pyright: ignore


class _Hook(DisplayHook):
    """sys.displayhook: the value of the last expression becomes the main result."""

    def quiet(self) -> bool:
        shell: Any = self.shell
        try:
            cell = shell.history_manager.input_hist_parsed[-1]
        except (IndexError, AttributeError):
            return False
        return ";" in cell and bool(self.semicolon_at_end_of_expression(cell))

    def __call__(self, result: Any = None) -> None:
        self.check_for_underscore()
        if result is None or self.quiet():
            return
        shell: Any = self.shell
        bundle, metadata = shell.display_formatter.format(result)
        self.update_user_ns(result)
        self.fill_exec_result(result)
        if not bundle:
            return
        shell.publish(bundle, metadata, True)
        text = bundle.get("text/plain")
        if isinstance(text, str) and len(text) <= 10000:
            shell.history_manager.output_hist_reprs[self.prompt_count] = text
            if shell.logger.log_output:
                shell.logger.log_write(text, "output")


class _Publisher(DisplayPublisher):
    """display(): results that are not main. update_display() sends one more result, marked with the id it replaces;
    clear_output() does nothing, since what was shown has left already."""

    def publish(self, data: Any, metadata: Any = None, source: Any = None, *, transient: Any = None,
                update: bool = False, **options: Any) -> None:
        shell: Any = self.shell
        for mime, handler in (getattr(shell, "mime_renderers", None) or {}).items():
            if mime in data:
                handler(data[mime], (metadata or {}).get(mime))
                return
        extra: dict[str, Any] = {}
        display_id = (transient or {}).get("display_id") if isinstance(transient, dict) else None
        if display_id is not None:
            extra["display_id"] = str(display_id)
            if update:
                extra["update"] = True
        shell.publish(data, metadata, False, extra)

    def clear_output(self, wait: bool = False) -> None:
        pass


@magics_class
class _Scripts(ScriptMagics):
    """`%%bash` and its kin without a background thread, unless asked for by --bg, --out, --err or --proc."""

    @cell_magic("script")
    def shebang(self, line: str, cell: str) -> Any:
        """Run a cell by a program: %%script PROGRAM, %%bash, %%sh, %%python3, %%perl, ..."""
        from IPython.utils.process import arg_split  # pyright: ignore[reportPrivateImportUsage]

        arguments, command = self.shebang.parser.parse_known_args(arg_split(line, posix=True))  # pyright: ignore
        if arguments.bg or arguments.out or arguments.err or arguments.proc or not command:
            return ScriptMagics.shebang(self, line, cell)
        try:
            code = _run_process(command, text=cell if cell.endswith("\n") else cell + "\n")
        except FileNotFoundError:
            print(f"Couldn't find program: {command[0]!r}")
            return None
        if arguments.raise_error and code != 0:
            raise subprocess.CalledProcessError(code, command[0])
        return None


_Scripts.shebang.parser = ScriptMagics.shebang.parser  # pyright: ignore[reportFunctionMemberAccess]


def _points_at(stream: Any, descriptor: int) -> bool:
    try:
        return stream.fileno() == descriptor
    except Exception:
        return False


def _run_process(command: Any, text: str | None = None, shell: bool = False, capture: bool = False) -> Any:
    """Runs a program in a session of its own and returns its exit code, or (code, output bytes) with `capture`.

    Its output goes to fd 1 and 2 unless sys.stdout or sys.stderr points elsewhere. An exception, such as
    KeyboardInterrupt, ends the program and its session first: SIGINT, after 0.2 s SIGKILL.
    """
    direct = _points_at(sys.stdout, 1) and _points_at(sys.stderr, 2)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass
    out: Any = subprocess.PIPE if capture or not direct else None
    err: Any = subprocess.STDOUT if capture else subprocess.PIPE if not direct else None
    process = subprocess.Popen(
        command, shell=shell, executable=(os.environ.get("SHELL") or None) if shell else None,
        stdin=subprocess.PIPE if text is not None else subprocess.DEVNULL, stdout=out, stderr=err,
        start_new_session=True)
    process._sigint_wait_secs = 0  # type: ignore[attr-defined]  # it would wait 0.25 s, believing a terminal sent ^C
    try:
        data = text.encode("utf-8", "surrogateescape") if text is not None else None
        if capture:
            output, _ = process.communicate()
            return process.returncode, output
        if not direct:
            _relay(process, data)
        elif data is not None:
            try:
                process.communicate(data)
            except BrokenPipeError:
                pass
        return process.wait()
    except BaseException:
        _end_session(process)
        raise


def _end_session(process: Any) -> None:
    for number, seconds in ((signal.SIGINT, 0.2), (signal.SIGKILL, 5)):
        try:
            os.killpg(process.pid, number)
        except OSError:
            pass
        try:
            process.wait(seconds)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            continue
        if number == signal.SIGINT:     # the leader is gone; what it left in the session goes too
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except OSError:
                pass
        return


def _relay(process: Any, data: bytes | None) -> None:
    """Copies a program's output to the Python streams of the moment, as it comes."""
    import codecs
    import selectors
    import threading

    if data is not None:
        def feed() -> None:
            try:
                process.stdin.write(data)
                process.stdin.close()
            except OSError:
                pass

        threading.Thread(target=feed, daemon=True).start()
    with selectors.DefaultSelector() as selector:
        for pipe, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            selector.register(pipe, selectors.EVENT_READ,
                              (target, codecs.getincrementaldecoder("utf-8")("replace")))
        while selector.get_map():
            for key, _ in selector.select():
                piece = os.read(key.fd, 65536)
                target, decoder = key.data
                target.write(decoder.decode(piece, not piece))
                if not piece:
                    selector.unregister(key.fileobj)
    process.stdout.close()
    process.stderr.close()


# ---------------------------------------------------------------------------------------------------------------------
# The shell
# ---------------------------------------------------------------------------------------------------------------------

class Shell(InteractiveShell):
    """The InteractiveShell of a kernel. `get_ipython()` returns it."""

    displayhook_class = Type(_Hook)
    display_pub_class = Type(_Publisher)

    run_depth = 0
    fatal: tuple[BaseException, dict[str, str]] | None = None
    figures: dict[int, Any]
    link: Any = None    # the _Language of this process; None in the zygote

    # --- construction without files ----------------------------------------------------------------------------------

    def init_ipython_dir(self, ipython_dir: Any) -> None:
        self.ipython_dir = ipython_dir or os.path.join(os.path.expanduser("~"), ".ipython")

    @observe("ipython_dir")
    def _ipython_dir_changed(self, change: Any) -> None:
        pass

    def init_profile_dir(self, profile_dir: Any) -> None:
        self.profile_dir = _QuietProfile(location=os.path.join(self.ipython_dir, "profile_default"))

    @property
    def db(self) -> Any:
        """Store of `%store`, `%bookmark` and the like, made below ~/.ipython when first used."""
        store = getattr(self, "_store", None)
        if store is None:
            path = os.path.join(os.path.expanduser("~"), ".ipython", "profile_default", "db")
            try:
                from IPython.external.pickleshare import PickleShareDB  # pyright: ignore[reportMissingImports]
            except ImportError:
                try:
                    from pickleshare import PickleShareDB  # pyright: ignore[reportMissingImports]
                except ImportError:
                    PickleShareDB = None
            try:
                store = PickleShareDB(path) if PickleShareDB is not None else {}
            except OSError:
                store = {}
            self._store = store
        return store

    @db.setter
    def db(self, value: Any) -> None:
        pass    # IPython 8 opens one at start; ours is opened when used

    @default("exiter")
    def _exiter_default(self) -> Any:
        return _Exit(self)

    def init_display_formatter(self) -> None:
        formatter: Any = _Formatter(parent=self)
        self.display_formatter = formatter
        self.configurables.append(formatter)
        png = formatter.formatters["image/png"]
        png.for_type_by_name("matplotlib.figure", "Figure", _figure_as_png)

    def init_magics(self) -> None:
        super().init_magics()
        self.register_magics(_Scripts)

    def init_virtualenv(self) -> None:
        pass

    # --- input -------------------------------------------------------------------------------------------------------

    def transform_cell(self, raw_cell: str) -> str:
        if self._is_plain_python(raw_cell):
            return raw_cell if raw_cell.endswith("\n") else raw_cell + "\n"
        return super().transform_cell(raw_cell)

    def _census(self) -> tuple[int, ...]:
        manager: Any = self.input_transformer_manager
        prefilter: Any = self.prefilter_manager
        return (len(manager.cleanup_transforms), len(manager.line_transforms), len(manager.token_transformers),
                len(self.input_transformers_post), len(prefilter.checkers), len(prefilter.transformers),
                len(prefilter.handlers))

    def _is_plain_python(self, cell: str) -> bool:
        """True when IPython's input machinery would hand the cell back as it is: nothing special in it, no transformer
        added by the user, and, for one line, no magic, macro or autocall object in front."""
        if _MAYBE_SPECIAL.search(cell) or not cell or self._census() != self.pristine:
            return False
        if "\n" in cell.rstrip("\n"):
            return True
        if self.autocall or "PYTHON-MODE" in cell:
            return False
        word = _FIRST_WORD.match(cell)
        if word is None:
            return True
        name = word.group()
        value = self.user_ns.get(name)
        return not isinstance(value, (Macro, IPyAutocall)) and (
            not self.automagic or self.find_line_magic(name) is None)

    pristine: tuple[int, ...] = ()

    def should_run_async(self, raw_cell: str, *, transformed_cell: Any = None,
                         preprocessing_exc_tuple: Any = None) -> bool:
        if transformed_cell is not None and "await" not in transformed_cell and "async" not in transformed_cell:
            return False
        return super().should_run_async(raw_cell, transformed_cell=transformed_cell,
                                        preprocessing_exc_tuple=preprocessing_exc_tuple)

    # --- running -----------------------------------------------------------------------------------------------------

    def run_cell(self, raw_cell: str, store_history: bool = False, silent: bool = False, shell_futures: bool = True,
                 cell_id: Any = None, cell_meta: Any = None) -> Any:
        """As InteractiveShell.run_cell, without copying all output into memory; figures come out at the end."""
        result = None
        self.run_depth += 1
        hook: Any = self.displayhook
        outer = hook.exec_result
        hook.exec_result = None
        try:
            arguments: Any = (raw_cell, store_history, silent, shell_futures, cell_id)
            result = self._run_cell(*(arguments + ((cell_meta,) if _TAKES_META else ())))
            return result
        finally:
            hook.exec_result = outer
            try:
                self.show_figures()
            finally:
                self.run_depth -= 1
                self.events.trigger("post_execute")
                if not silent:
                    self.events.trigger("post_run_cell", result)

    def _format_exception_for_storage(self, exception: BaseException, *arguments: Any, **options: Any) -> Any:
        known = self.fatal[1] if self.fatal is not None and self.fatal[0] is exception else None
        return {"ename": type(exception).__name__, "evalue": known["value"] if known else "",
                "traceback": [known["traceback"]] if known else []}

    def system(self, cmd: str) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """`!cmd`: by $SHELL, output to fd 1 and 2; sets _exit_code (negative: ended by that signal)."""
        code = _run_process(self.var_expand(cmd, depth=1), shell=True)
        if code > 128:
            code = 128 - code
        self.user_ns["_exit_code"] = code
        if getattr(self, "system_raise_on_error", False) and code != 0:
            raise subprocess.CalledProcessError(code, cmd)

    system_raw = system_piped = system  # type: ignore[assignment]

    def getoutput(self, cmd: str, split: bool = True, depth: int = 0) -> Any:
        """`x = !cmd`: stdout and stderr together, as a list of lines."""
        code, output = _run_process(self.var_expand(cmd, depth=depth + 1), shell=True, capture=True)
        text = output.decode("utf-8", "replace")
        if getattr(self, "system_raise_on_error", False):
            self.user_ns["_exit_code"] = code
            if code != 0:
                raise subprocess.CalledProcessError(code, cmd)
        return SList(text.splitlines()) if split else LSString(text)

    # --- results -----------------------------------------------------------------------------------------------------

    def publish(self, bundle: dict[str, Any], metadata: Any, main: bool, extra: Any = None) -> None:
        if self.link is not None:
            self.link.publish(bundle, metadata, main, extra)

    def write_error(self, text: str) -> None:
        try:
            sys.stderr.write(text)
        except Exception:
            pass

    def enable_gui(self, gui: Any = None) -> None:
        if gui not in (None, "inline", "agg", ""):
            raise UsageError(f"there is no display in a sandbox: event loop {gui!r} is not available; figures are shown "
                             "without one")

    def enable_matplotlib(self, gui: Any = None) -> Any:
        if gui not in (None, "auto", "inline", "agg"):
            self.write_error("[ringfence] there is no display in a sandbox; figures are shown inline\n")
        return super().enable_matplotlib("inline")

    def figure_is_new(self, figure: Any) -> bool:
        """Notes that `figure` comes out now. False when that would be matplotlib's own second time (plt.show() after
        display(figure)); asking for it again by name is no repetition."""
        if id(figure) not in self.figures:
            self.figures[id(figure)] = figure
            return True
        frame = sys._getframe(2)
        for _ in range(3):
            if frame is None:
                break
            if frame.f_globals.get("__name__") == "matplotlib_inline.backend_inline":
                return False
            frame = frame.f_back
        return True

    def show_figures(self) -> None:
        """Sends every open figure that was not sent in this execution, and closes them all."""
        helpers = sys.modules.get("matplotlib._pylab_helpers")
        if helpers is None:
            return
        try:
            managers = helpers.Gcf.get_all_fig_managers()
            if not managers:
                return
            inline = sys.modules.get("matplotlib_inline.config")
            if inline is not None and inline.InlineBackend.initialized() and (
                    not inline.InlineBackend.instance().close_figures):
                return  # the user asked to keep figures open (%config InlineBackend.close_figures)
            try:
                for manager in managers:
                    if id(manager.canvas.figure) not in self.figures:
                        display(manager.canvas.figure)
            finally:
                helpers.Gcf.destroy_all()
        except Exception:
            self.write_error("[ringfence] a figure could not be shown:\n" + traceback.format_exc())

    # --- errors ------------------------------------------------------------------------------------------------------

    def showtraceback(self, exc_tuple: Any = None, filename: Any = None, tb_offset: Any = None,
                      exception_only: bool = False, running_compiled_code: bool = False) -> None:
        try:
            kind, value, trace = self._get_exc_info(exc_tuple)
        except ValueError:
            self.write_error("No traceback available to show.\n")
            return
        if issubclass(kind, SyntaxError):
            self._report(kind, value, trace, running_compiled_code, filename)
        else:
            self._report(kind, value, trace, offset=tb_offset)

    def showsyntaxerror(self, filename: Any = None, running_compiled_code: bool = False) -> None:
        kind, value, trace = self._get_exc_info()
        self._report(kind, value, trace, running_compiled_code, filename)

    def _report(self, kind: Any, value: Any, trace: Any, compiled: bool = True, filename: Any = None,
                offset: Any = None) -> None:
        formatter: Any = self.display_formatter
        result = self.displayhook.exec_result
        if formatter.depth:
            formatter.failed = kind.__name__
            fatal = False
        else:
            # Anything but the error of the outermost cell (a user's get_ipython().showtraceback(), a nested run_cell)
            # is output.
            fatal = self.run_depth == 1 and (
                result is None or value in (result.error_in_exec, result.error_before_exec))
        link = self.link
        if fatal and link is not None and link.was_cancelled(value):
            kind, value = KeyboardInterrupt, KeyboardInterrupt().with_traceback(trace)
        error = describe_error(self, kind, value, trace, compiled, filename, offset)
        if fatal:
            self.fatal = (value, error)
        else:
            self.write_error(error["traceback"] + "\n")

    def _showtraceback(self, etype: Any, evalue: Any, stb: Any) -> None:
        self.write_error(self.InteractiveTB.stb2text(stb) + "\n")


def _figure_as_png(figure: Any) -> Any:
    from IPython.core.pylabtools import print_figure

    return print_figure(figure, "png", bbox_inches="tight")


_TAKES_META = InteractiveShell._run_cell.__code__.co_argcount > 6


# ---------------------------------------------------------------------------------------------------------------------
# Errors as text
# ---------------------------------------------------------------------------------------------------------------------

def describe_error(shell: Any, kind: type, value: BaseException, trace: Any, compiled: bool = True,
                   filename: Any = None, offset: Any = None) -> dict[str, str]:
    """{"name", "value", "traceback"} of an exception, whatever its methods do: text that raises is replaced, an
    interrupt while it is being made falls back to the plain traceback."""
    interrupted = False
    try:
        text = rich_results.safe_text(value, VALUE_LIMIT)
    except BaseException:
        text, interrupted = "<str() of the exception was interrupted>", True
    rendered: str | None = None
    if not interrupted:
        try:
            rendered = _render(shell, kind, value, trace, compiled, filename, offset)
        except BaseException:
            rendered = None
    if rendered is None:
        try:
            rendered = "Traceback (most recent call last):\n{}{}: {}".format(
                "".join(traceback.format_tb(trace, -50)), kind.__name__, text)
        except BaseException:
            rendered = f"{kind.__name__}: {text}"
    return {"name": kind.__name__, "value": text, "traceback": rich_results.cut(rendered, TRACEBACK_LIMIT)}


def _render(shell: Any, kind: type, value: BaseException, trace: Any, compiled: bool, filename: Any,
            offset: Any) -> str:
    if kind is UsageError:
        return f"UsageError: {value}"
    if issubclass(kind, SystemExit):
        return f"SystemExit: {value}\n(the kernel goes on; variables are kept)"
    if issubclass(kind, SyntaxError):
        if filename and isinstance(value, SyntaxError):
            value.filename = filename
        frames: Any = traceback.extract_tb(trace) if compiled else []
        return shell.InteractiveTB.stb2text(shell.SyntaxTB.structured_traceback(kind, value, frames))
    if _has_group(value):
        return "".join(traceback.format_exception(kind, value, _user_part(trace))).rstrip("\n")
    custom = getattr(value, "_render_traceback_", None)
    if custom is not None:
        return "\n".join(str(line) for line in custom())
    if offset is None:
        trace, left_out = _own_frames(trace)
        offset = 0
    else:
        left_out = 0
    text = shell.InteractiveTB.stb2text(
        shell.InteractiveTB.structured_traceback(kind, value, trace, tb_offset=offset))
    if left_out:
        text += f"\n({left_out} frames in the middle of the traceback are left out)"
    return text


def _has_group(value: Any) -> bool:
    group = _ORIGINAL_BUILTINS.get("BaseExceptionGroup")
    seen = 0
    while group is not None and value is not None and seen < 1000:
        if isinstance(value, group):
            return True
        value, seen = value.__cause__ or value.__context__, seen + 1
    return False


def _is_internal(frame: Any) -> bool:
    return frame.f_code.co_filename.startswith(_INTERNAL)


def _user_part(trace: Any) -> Any:
    """The traceback without the frames of IPython and of the kernel that lie above the cell."""
    first = trace
    while first is not None and _is_internal(first.tb_frame):
        first = first.tb_next
    return first if first is not None else trace


def _own_frames(trace: Any) -> tuple[Any, int]:
    """The traceback without frames of IPython and the kernel, wherever they are (they say nothing about the user's
    code, and rendering them takes most of a second), and of more than MAX_FRAMES only the outermost and innermost.
    Returns it and the number of frames left out of the middle."""
    entries = []
    entry = trace
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    own = [entry for entry in entries if not _is_internal(entry.tb_frame)]
    left_out = max(0, len(own) - MAX_FRAMES)
    if left_out:
        own = own[:MAX_FRAMES // 2] + own[-(MAX_FRAMES - MAX_FRAMES // 2):]
    if not own or own == entries:
        return trace, 0
    chain = None
    for entry in reversed(own):
        chain = types.TracebackType(chain, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return chain, left_out


# ---------------------------------------------------------------------------------------------------------------------
# The event loop of top-level await
# ---------------------------------------------------------------------------------------------------------------------

class _LoopRunner:
    """Runs an awaiting cell. An interrupt cancels the cell's task, so that nothing of it goes on in the next cell."""

    def __init__(self) -> None:
        self.task: Any = None
        self.loop: Any = None
        self.cancelled = False
        self.interrupts: Any = None

    def __str__(self) -> str:
        return "asyncio"

    def __call__(self, coroutine: Any) -> Any:
        import asyncio

        from IPython.core.async_helpers import get_asyncio_loop

        loop = self.loop = get_asyncio_loop()
        if loop.is_running():
            return loop.run_until_complete(coroutine)   # raises the clear error of asyncio
        task = self.task = loop.create_task(coroutine)
        self.cancelled = False
        if self.interrupts is not None:
            self.interrupts.redirect = self.redirect
        try:
            try:
                return loop.run_until_complete(task)
            except BaseException:
                # Raised through the loop while the cell's task waits (a background task was interrupted): end it.
                if not task.done():
                    task.cancel()
                    self.cancelled = True
                    loop.run_until_complete(asyncio.wait([task], timeout=2))
                    if task.done() and not task.cancelled() and task.exception() is None:
                        return task.result()
                raise
        finally:
            if self.interrupts is not None:
                self.interrupts.redirect = None
            self.task = None

    def redirect(self) -> bool:
        """Called by the SIGINT handler. False: raise KeyboardInterrupt where the code is (a step of a task runs)."""
        import asyncio

        loop, task = self.loop, self.task
        if loop is None or asyncio.current_task(loop) is not None:
            return False
        if task is None:
            return loop.is_running()    # between cells, nothing on the stack: ignore
        if task.done() or self.cancelled:
            return False
        self.cancelled = True
        task.cancel()
        loop.call_soon_threadsafe(lambda: None)     # wakes select()
        return True

    def has_work(self) -> bool:
        """Whether anything would happen if the loop ran."""
        async_helpers = sys.modules.get("IPython.core.async_helpers")
        loop = getattr(async_helpers, "_asyncio_event_loop", None)
        if loop is None or loop.is_closed() or loop.is_running():
            return False
        self.loop = loop
        return bool(getattr(loop, "_ready", None) or getattr(loop, "_scheduled", None)
                    or sys.modules["asyncio"].all_tasks(loop))


# ---------------------------------------------------------------------------------------------------------------------
# The leaf: what kernel.py calls
# ---------------------------------------------------------------------------------------------------------------------

_shell: Shell | None = None
_modules: dict[str, Any] = {}   # as the zygote had them; a copy in each child would touch, and so copy, every module
_runner = _LoopRunner()


class _Language:
    """One Python context. Made by `start` in the kernel process."""

    def __init__(self, shell: Shell, executions: Any, send: Callable, interrupts: Any, streams: Any,
                 result_limit: int) -> None:
        self.shell, self.executions, self.send = shell, executions, send
        self.interrupts, self.streams, self.result_limit = interrupts, streams, result_limit
        self.silent = False
        self.modules = (sys.modules, _modules)

    def execute(self, request: Request) -> Outcome:
        """Runs a cell. Everything in here may be interrupted by KeyboardInterrupt."""
        shell = self.shell
        self.silent = request.quiet
        shell.fatal = None
        shell.figures = {}
        shell.run_depth = 0
        shell.display_formatter.depth = 0  # pyright: ignore[reportOptionalMemberAccess,reportAttributeAccessIssue]
        _runner.cancelled = False
        if sys.modules.get("__main__") is not shell.user_module:
            sys.modules["__main__"] = shell.user_module
        before: dict[str, str | None] = {}
        try:
            if request.env:
                for name, value in request.env.items():
                    before[name] = os.environ.get(name)
                    os.environ[name] = value
            result = shell.run_cell(request.code, store_history=not request.quiet, silent=request.quiet)
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
        error = (result.error_before_exec or result.error_in_exec) if result is not None else None
        count = self._count(result)
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except Exception:
            pass
        self._repair()
        if error is None:
            return Outcome("ok", count)
        known = shell.fatal
        if known is not None and (known[0] is error or isinstance(known[0], KeyboardInterrupt)):
            return self._outcome(known[1], count)
        return self._outcome(describe_error(shell, type(error), error, error.__traceback__), count)

    def forget(self) -> None:
        """After a rehearsal: the next cell is the first."""
        _reset(self.shell)
        self.shell.link = self

    def _repair(self) -> None:
        """Puts back what the interpreter cannot work without: builtins and modules that a cell removed, not those that
        it replaced."""
        missing = _ORIGINAL_BUILTINS.keys() - vars(builtins).keys()
        missing.discard("_")
        if missing:
            self._repair_builtins(sorted(missing))
        modules = self.modules
        if sys.modules is not modules[0] or sys.modules.get("sys") is not sys or (
                "IPython.core.interactiveshell" not in sys.modules):
            sys.modules = modules[0]
            for name, module in modules[1].items():
                if name in ("sys", "builtins") or name not in sys.modules:
                    sys.modules[name] = module
            self.streams.note("modules that a cell had taken out of sys.modules were put back")

        namespace = self.shell.user_ns
        if "_oh" not in namespace:  # globals().clear()
            namespace.setdefault("__name__", "__main__")
            self.shell.init_user_ns()

    def _count(self, result: Any = None) -> int:
        count = getattr(result, "execution_count", None)
        if isinstance(count, int):
            return count
        count = self.shell.execution_count
        return max(count - 1, 0) if isinstance(count, int) else 0

    def _outcome(self, error: dict[str, str], count: int) -> Outcome:
        stopped = error["name"] == "KeyboardInterrupt" and self.interrupts.fired
        return Outcome("interrupted" if stopped else "error", count, rich_results.encode(error))

    def failed(self, error: BaseException) -> Outcome:
        """An exception came out of `execute`: an interrupt outside of the cell's own code, or IPython broke because the
        cell took something away that it needs."""
        shell = self.shell
        if not isinstance(error, KeyboardInterrupt):
            changed = [name for name, value in _ORIGINAL_BUILTINS.items()
                       if vars(builtins).get(name, None) is not value and name not in ("_", "display", "input")]
            if changed:
                self._repair_builtins(changed)
        try:
            shell.builtin_trap._nested_level = shell.display_trap._nested_level = 0
            sys.displayhook = sys.__displayhook__
            count = self._count()
            description = shell.fatal[1] if shell.fatal is not None and not isinstance(error, KeyboardInterrupt) else (
                describe_error(shell, type(error), error, error.__traceback__))
            return self._outcome(description, count)
        except BaseException:
            return Outcome("error", 0, rich_results.encode(
                {"name": type(error).__name__, "value": "", "traceback": type(error).__name__}))

    def _repair_builtins(self, names: Sequence[str]) -> None:
        for name in names:
            builtins.__dict__[name] = _ORIGINAL_BUILTINS[name]
        self.streams.note("builtins that a cell had taken away were put back: " + ", ".join(names[:10])
                          + (f" and {len(names) - 10} more" if len(names) > 10 else ""))

    def publish(self, bundle: dict[str, Any], metadata: Any, main: bool, extra: Any) -> None:
        """A result of the calling thread or task; dropped when its execution is over or asked for quiet."""
        number = self.executions.mine()
        if not number or self.silent or not isinstance(bundle, dict):
            return
        payload, notes = rich_results.result_payload(bundle, metadata, main, self.result_limit, extra)
        self.send(number, payload, main)
        for note in notes:
            self.shell.write_error(f"[ringfence] {note}\n")

    def was_cancelled(self, value: BaseException) -> bool:
        asyncio = sys.modules.get("asyncio")
        return _runner.cancelled and asyncio is not None and isinstance(value, asyncio.CancelledError)

    def background(self, descriptor: int) -> None:
        """Runs the event loop until `descriptor` is readable, when tasks are pending; else returns at once."""
        if not _runner.has_work():
            return
        loop = _runner.loop
        self.interrupts.redirect = _runner.redirect
        try:
            loop.add_reader(descriptor, loop.stop)
            try:
                loop.run_forever()
            finally:
                loop.remove_reader(descriptor)
        finally:
            self.interrupts.redirect = None

    def report(self, error: BaseException, where: str) -> None:
        """Something of the user's raised where no cell runs."""
        try:
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__, limit=-5))
        except BaseException:
            text = type(error).__name__
        self.streams.note("exception {}:\n{}".format(where, text.rstrip("\n")))

    def shutdown(self) -> None:
        """Functions that user code registered with atexit, as at the end of a program."""
        import atexit

        try:
            atexit._run_exitfuncs()
        except BaseException as error:
            self.report(error, "at exit")

    def exit_child(self, outcome: Outcome) -> NoReturn:
        """The end of a child made by os.fork() in a cell: it goes away as a script does, its error on stderr."""
        code = 0
        error = self.shell.fatal
        if error is not None:
            if isinstance(error[0], SystemExit):
                code = error[0].code if isinstance(error[0].code, int) else 0 if error[0].code is None else 1
            else:
                code = 1
                self.shell.write_error(error[1]["traceback"] + "\n")
        elif outcome.status != "ok":
            code = 1
        self.streams.flush()
        os._exit(code & 255)


def _build() -> Shell:
    """The shell, in the zygote: no thread, no database, no directory made."""
    config = Config()
    config.HistoryManager.enabled = False
    config.HistoryManager.hist_file = ":memory:"
    config.Completer.use_jedi = False
    nine = int(IPython.version_info[0]) >= 9
    # IPython 8 would make its store's directory in the constructor.
    replaced = getattr(_interactiveshell, "PickleShareDB", None)
    if replaced is not None:
        _interactiveshell.PickleShareDB = lambda path: None  # type: ignore[attr-defined]
    try:
        Shell.clear_instance()
        shell = Shell.instance(config=config, colors="nocolor" if nine else "NoColor", autocall=0, display_page=True)
    finally:
        if replaced is not None:
            _interactiveshell.PickleShareDB = replaced  # type: ignore[attr-defined]
    InteractiveShell._instance = shell  # pyright: ignore[reportAttributeAccessIssue]
    shell.figures = {}
    shell.show_rewritten_input = False
    shell.autoindent = False
    shell.loop_runner = _runner
    shell.pristine = shell._census()
    builtins.input = _no_input
    getpass.getpass = getpass.unix_getpass = _no_getpass  # type: ignore[assignment]
    sys.breakpointhook = sys.__breakpointhook__ = _no_breakpoint  # type: ignore[misc]
    _ORIGINAL_BUILTINS.update(input=_no_input, display=vars(builtins)["display"])
    warnings.filterwarnings("ignore", message="To exit: use 'exit'", category=UserWarning)
    return shell


_WARM_CELLS = (
    "1+1",
    "x = [1, 2.5, 'a']\nfor i in range(3):\n    x.append(i)\nx",
    "print(1)\n{'a': 1}",
    "from IPython.display import HTML\ndisplay(HTML('<b>x</b>'))",
    "def f(x):\n    return 1 / x\nf(0)",
    "syntax error here",
    "%who\n%xmode",
    "import os\nos.environ.get('HOME')",
)

_WARM_DATA = (
    ("pandas", "import pandas\npandas.DataFrame({'a': [1, 2], 'b': ['x', None]})"),
    ("matplotlib.pyplot", "import matplotlib.pyplot as plt\n_ = plt.plot([1, 2], [3, 4])\nplt.title('x')\nplt.show()"),
)


def warm(modules: Sequence[str] = ()) -> list[str]:
    """Prepares the zygote: builds the shell, imports `modules`, runs cells through the path of the children, and
    resets the state to that of a fresh session.

    Leaves one thread, no descriptor, no event loop, no file. Returns a line for each module that could not be imported
    (the caller decides whether that is an error). Set before: OPENBLAS_NUM_THREADS=1 and the like, and MPLCONFIGDIR
    where the environment carries a font cache (it is read, also when it is not writable).
    """
    global _shell
    descriptors = _descriptors()
    os.environ.setdefault("MPLBACKEND", INLINE_BACKEND)
    main_before = sys.modules.get("__main__")
    shell = _build()
    problems = []
    for name in modules:
        try:
            if name.partition(".")[0] in ("matplotlib", "e2b_charts", "seaborn"):
                _import_matplotlib()
            __import__(name)
        except Exception as error:
            problems.append(f"{name}: {type(error).__name__}: {error}")
    _shell = shell
    cells = _WARM_CELLS + tuple(cell for name, cell in _WARM_DATA if name in sys.modules)
    for cell in cells * 2:
        try:
            kernel.rehearse(cell, {"language": "python", "random": ""})
        except Exception as error:
            problems.append(f"warm-up cell {cell!r}: {type(error).__name__}: {error}")
    _reset(shell)
    _modules.clear()
    _modules.update(sys.modules)
    # The caller's own __main__ stays alive: its functions are still running.
    shell.meta.host_main = main_before
    _close_fonts()
    gc.collect()
    gc.freeze()     # a full collection in a child would write to every object, and so copy every page
    problems += ["left open: fd {} ({})".format(*item) for item in sorted(_descriptors().items())
                 if item[0] not in descriptors]
    return problems


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink("/proc/self/fd/" + name)
        except OSError:
            pass    # the one that listed the directory
    return found


def _close_fonts() -> None:
    """matplotlib keeps font files open. Forks would share their file offset, and read each other's glyphs."""
    manager = sys.modules.get("matplotlib.font_manager")
    for name in ("_get_font", "get_font"):
        clear = getattr(getattr(manager, name, None), "cache_clear", None)
        if clear is not None:
            clear()


def _import_matplotlib() -> None:
    """Imports pyplot without matplotlib making a configuration directory (a temporary one, with a warning, when HOME or
    MPLCONFIGDIR is not writable). The font cache of MPLCONFIGDIR is used though."""
    if "matplotlib" in sys.modules:
        return
    import importlib.util

    spec = importlib.util.find_spec("matplotlib")
    if spec is None or not spec.submodule_search_locations:
        return
    defaults = os.path.join(next(iter(spec.submodule_search_locations)), "mpl-data", "matplotlibrc")
    directory = os.environ.get("MPLCONFIGDIR")
    explicit = os.environ.get("MATPLOTLIBRC")
    if explicit is None and os.path.exists(defaults):
        os.environ["MATPLOTLIBRC"] = defaults   # found first, so the configuration directory is not asked for
    try:
        matplotlib: Any = __import__("matplotlib")
        originals = matplotlib.get_configdir, matplotlib.get_cachedir
        if directory and os.path.isdir(directory):
            matplotlib.get_configdir = matplotlib.get_cachedir = lambda: directory
        try:
            __import__("matplotlib.pyplot")
            __import__("matplotlib.backends.backend_agg")
        finally:
            matplotlib.get_configdir, matplotlib.get_cachedir = originals
    finally:
        if explicit is None:
            os.environ.pop("MATPLOTLIBRC", None)


def _reset(shell: Shell) -> None:
    """Forgets the warm-up: namespace, history, counters, cached sources, the last exception."""
    shell.link = None
    shell.fatal = None
    shell.figures = {}
    namespace = shell.user_ns
    for name in list(namespace):
        if name not in ("__name__", "__doc__", "__package__", "__loader__", "__spec__", "__builtin__", "__builtins__"):
            del namespace[name]
    shell.user_ns_hidden.clear()
    history: Any = shell.history_manager
    history.reset(new_session=True)
    history.output_hist_reprs.clear()
    for name in ("outputs", "exceptions"):
        getattr(history, name, {}).clear()
    history.db_input_cache.clear()
    history.db_output_cache.clear()
    shell.init_user_ns()
    shell.displayhook.flush()
    shell.displayhook.exec_result = None
    shell.execution_count = 1
    shell.last_execution_result = None
    shell.last_execution_succeeded = True
    for name in [name for name in linecache.cache if name.startswith("<ipython-input")]:
        del linecache.cache[name]
    shell.compile._filename_map.clear()
    shell.InteractiveTB.tb = None
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    shell.xmode = "Context"
    shell.InteractiveTB.set_mode(mode="Context")


def start(config: dict[str, Any], executions: Any, send: Callable, interrupts: Any, streams: Any) -> _Language:
    """Binds the warmed shell to this process. Without a warmed zygote it builds the shell now (0.3 s)."""
    if _shell is None:
        warm(())
    shell = _shell
    assert shell is not None
    language = _Language(shell, executions, send, interrupts, streams,
                         int(config.get("result_limit") or kernel.DEFAULT_RESULT_LIMIT))
    shell.link = language
    _runner.interrupts = interrupts
    environment = os.environ
    environment.setdefault("MPLBACKEND", INLINE_BACKEND)
    for name in ("PAGER", "GIT_PAGER", "MANPAGER"):
        environment.setdefault(name, "cat")     # no keyboard to leave a pager with
    directory = environment.get("MPLCONFIGDIR")
    if directory and not os.access(directory, os.W_OK):
        # matplotlib would warn and make a temporary directory; its caches go below HOME instead.
        del environment["MPLCONFIGDIR"]
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules beside the notebook, as in Jupyter
    here = os.getcwd()
    shell.starting_dir = here
    shell.home_dir = environment.get("HOME", here)
    history: Any = shell.history_manager
    history.dir_hist[:] = [here]
    shell.ipython_dir = os.path.join(shell.home_dir, ".ipython")
    sys.argv = [""]
    return language


