"""The laws of code contexts in languages other than Python: one law, every language (`languages_spoken.py`).

Guards the section "Languages" of the specification, on the real engine. A language whose program this machine does
not have below /usr is skipped, with that reason; `.ci/run` installs them all.
"""

from __future__ import annotations

import base64
import shutil
import threading

import pytest
from languages_spoken import ALL, BASH, JAVASCRIPT, Spoken
from languages_spoken import R as RLANG

from ringfence import InvalidArgumentError, NotFoundError, SandboxDeadError, TimeoutExceededError


def installed(language: Spoken) -> bool:
    return shutil.which(language.program, path="/usr/local/bin:/usr/bin:/bin") is not None


@pytest.fixture(params=ALL, ids=lambda language: language.name)
def language(request: pytest.FixtureRequest) -> Spoken:
    if not installed(request.param):
        pytest.skip(f"this machine has no {request.param.program} below /usr")
    return request.param


def need(language: Spoken) -> str:
    if not installed(language):
        pytest.skip(f"this machine has no {language.program} below /usr")
    return language.name


def ok(execution):
    assert execution.error is None, (execution.error.name, execution.error.value, execution.error.traceback)
    return execution


def printed(execution) -> str:
    return "".join(ok(execution).logs.stdout)


@pytest.fixture
def context(sandbox, language):
    """A fresh context of the language in the shared sandbox."""
    made = sandbox.create_code_context(language=language.name)
    yield made
    sandbox.remove_code_context(made)


# -- sessions


def test_state_stays_from_cell_to_cell_in_the_languages_own_default_context(sandbox, language):
    sandbox.run_code("kept = 1")
    ok(sandbox.run_code(language.keep, language=language.name))
    assert printed(sandbox.run_code(language.tell, language=language.name)).strip() == "42"
    assert sandbox.run_code("kept").text == "1"
    listed = {item.id: item.language for item in sandbox.list_code_contexts()}
    assert listed[f"default-{language.name}"] == language.name and listed["default"] == "python"


def test_contexts_keep_their_state_apart_and_are_restarted_and_deleted(sandbox, language, context):
    other = sandbox.create_code_context(language=language.name)
    ok(sandbox.run_code(language.keep, context=context))
    assert "gone" in printed(sandbox.run_code(language.gone, context=other))
    assert "21" in printed(sandbox.run_code(language.gone, context=context))
    sandbox.restart_code_context(context)
    assert "gone" in printed(sandbox.run_code(language.gone, context=context))
    assert sandbox.remove_code_context(other) is True
    with pytest.raises(NotFoundError):
        sandbox.run_code(language.keep, context=other)


def test_a_context_has_a_directory_and_an_environment_and_a_cell_may_have_its_own(sandbox, language):
    context = sandbox.create_code_context(cwd="/tmp", language=language.name, envs={"RF_OWN": "context's"})
    where = lambda **more: printed(sandbox.run_code(language.where, context=context, **more)).strip()
    assert where() == "/tmp context's"
    assert where(envs={"RF_OWN": "it's a cell's \\ $HOME"}) == "/tmp it's a cell's \\ $HOME"
    assert where() == "/tmp context's"
    sandbox.remove_code_context(context)


def test_output_comes_as_it_is_written_on_the_stream_it_was_written_to(sandbox, language, context):
    seen = []
    sandbox.run_code(
        language.both, context=context, on_stdout=lambda m: seen.append(("out", m.line)), on_stderr=lambda m: seen.append(("err", m.line))
    )
    assert sorted(seen) == [("err", "err\n"), ("out", "out\n")]
    with pytest.raises(TimeoutExceededError) as caught:
        sandbox.run_code(language.spins, context=context, timeout=3)
    assert "begun" in "".join(caught.value.partial.logs.stdout)


def test_the_newest_output_is_kept_and_all_of_it_counted(make, language):
    execution = ok(make(output="64KiB").run_code(language.floods, language=language.name))
    assert execution.logs.truncated and execution.logs.stdout_total >= 1 << 22
    assert "".join(execution.logs.stdout).endswith("last\n")


# -- errors


def test_an_error_is_a_result_with_name_and_traceback_and_state_stays(sandbox, language, context):
    code, name, part = language.fails
    ok(sandbox.run_code(language.keep, context=context))
    error = sandbox.run_code(code, context=context).error
    assert error is not None and error.name == name and part in error.traceback and error.kind == "exception"
    assert printed(sandbox.run_code(language.tell, context=context)).strip() == "42"


def test_code_that_does_not_parse_is_the_cells_error(sandbox, language, context):
    code, name = language.broken
    error = sandbox.run_code(code, context=context).error
    assert error is not None and error.name == name and error.value and error.traceback


# -- time


def test_a_timeout_interrupts_first_and_variables_survive(sandbox, language, context):
    ok(sandbox.run_code(language.keep, context=context))
    for code in (language.spins, language.sleeps):
        with pytest.raises(TimeoutExceededError) as caught:
            sandbox.run_code(code, context=context, timeout=1)
        assert caught.value.outcome == "interrupted"
        assert printed(sandbox.run_code(language.tell, context=context)).strip() == "42"


def test_a_timeout_replaces_a_kernel_that_ignores_the_interrupt_and_says_so(sandbox, language, context):
    ok(sandbox.run_code(language.keep, context=context))
    with pytest.raises(TimeoutExceededError) as caught:
        sandbox.run_code(language.stubborn, context=context, timeout=1)
    assert caught.value.outcome == "restarted" and "variables are gone" in str(caught.value)
    assert "gone" in printed(sandbox.run_code(language.gone, context=context))


def test_an_interrupt_from_outside_ends_the_cell_and_keeps_the_state(sandbox, language, context):
    ok(sandbox.run_code(language.keep, context=context))
    threading.Timer(0.5, sandbox.interrupt_code_context, [context]).start()
    error = sandbox.run_code(language.sleeps, context=context, timeout=50).error
    assert error is not None and error.name == "KeyboardInterrupt"
    assert printed(sandbox.run_code(language.tell, context=context)).strip() == "42"


def test_an_interrupt_when_nothing_runs_ends_nothing(sandbox, language, context):
    ok(sandbox.run_code(language.keep, context=context))
    sandbox.interrupt_code_context(context)
    assert printed(sandbox.run_code(language.tell, context=context)).strip() == "42"


# -- what cells do to their interpreter


def test_an_interpreter_that_ends_is_told_with_its_code_and_the_next_cell_gets_a_fresh_one(sandbox, language, context):
    error = sandbox.run_code(language.leaves, context=context).error
    assert error is not None and error.name == "KernelDiedError" and "code 3" in error.value
    execution = sandbox.run_code(language.gone, context=context)
    assert "gone" in printed(execution) and execution.restarted


def test_a_native_crash_is_told_with_its_signal(sandbox, language, context):
    code, name = language.crashes
    error = sandbox.run_code(code, context=context).error
    assert error is not None and error.name == "KernelDiedError" and name in error.value
    assert "gone" in printed(sandbox.run_code(language.gone, context=context))


def test_a_closed_or_redirected_standard_output_ends_nothing(sandbox, language, context):
    for code in language.spoils:
        sandbox.run_code(code, context=context)
        assert printed(sandbox.run_code(language.says, context=context)) == "again\n", code


def test_reading_standard_input_meets_its_end(sandbox, language, context):
    assert printed(sandbox.run_code(language.reads, context=context)).strip() == "0"


def test_a_background_child_that_holds_the_output_open_delays_nothing(sandbox, language, context):
    ok(sandbox.run_code(language.child, context=context, timeout=30))
    assert printed(sandbox.run_code(language.says, context=context, timeout=30)) == "again\n"


def test_programs_that_a_cell_starts_have_none_of_the_channels(sandbox, language, context):
    found = [int(word) for word in printed(sandbox.run_code(language.descriptors, context=context)).split()]
    # `ls` has the three, the directory that it reads, and R's has the driver's text.
    assert len(found) <= 5 and max(found) < 10


def test_memory_that_runs_out_ends_the_interpreter_at_most(make, language, strength):
    sandbox = make("plain", limits={"memory": "200MiB", "disk": "16MiB", "tmp": "16MiB"})
    try:
        error = sandbox.run_code(language.eats, language=language.name, timeout=60).error
    except SandboxDeadError as dead:
        # Watched memory is a sum, and whoever passes it takes the sandbox along.
        assert strength["limit memory"] == "watched" and "memory" in str(dead)
        return
    assert error is not None
    assert sandbox.is_running() and printed(sandbox.run_code(language.says, language=language.name)) == "again\n"


# -- whose result is it


def test_what_speaks_after_its_cell_is_no_later_cells_result(sandbox, language, context):
    ok(sandbox.run_code(language.late, context=context))
    execution = sandbox.run_code(language.waits, context=context)
    assert printed(execution).endswith("mine\n") and execution.results == []


def test_words_without_the_executions_number_are_no_end_and_no_result(sandbox, language, context):
    # A nonce is 32 hexadecimal digits; any other one is somebody else's. tests/unit/test_interpreter.py has the control.
    words = "done 00000000000000000000000000000000 %s\\n" % ("0" if language.name == "bash" else "ok")
    execution = sandbox.run_code(f"{language.forges % repr(words).replace(chr(92) * 2, chr(92))}\n{language.says}", context=context)
    assert printed(execution) == "again\n"
    assert printed(sandbox.run_code(language.says, context=context)) == "again\n"


def test_nonsense_on_the_channel_ends_one_context_only(sandbox, language, context):
    bystander = sandbox.create_code_context(language=language.name)
    ok(sandbox.run_code(language.keep, context=bystander))
    try:
        sandbox.run_code(language.forges % "'nonsense that nobody asked for\\n'", context=context, timeout=10)
    except TimeoutExceededError as error:
        assert error.outcome == "restarted"
    assert printed(sandbox.run_code(language.tell, context=bystander)).strip() == "42"
    assert printed(sandbox.run_code(language.says, context=context)) == "again\n"
    sandbox.remove_code_context(bystander)


# -- names


@pytest.mark.parametrize("alias", ["sh", "shell", "Bash"])
def test_a_shell_has_many_names(sandbox, alias):
    assert printed(sandbox.run_code("echo $BASH_VERSION", language=alias)).strip()


@pytest.mark.parametrize("alias", ["js", "node", "JavaScript"])
def test_javascript_has_many_names(sandbox, alias):
    need(JAVASCRIPT)
    assert sandbox.run_code("typeof require", language=alias).text == "function"


def test_an_unknown_language_is_refused_with_the_list(sandbox):
    with pytest.raises(InvalidArgumentError) as caught:
        sandbox.run_code("x", language="cobol")
    assert all(name in caught.value.hint for name in ("python", "bash", "javascript"))


def test_a_missing_interpreter_is_refused_with_the_package_and_what_is_there(sandbox, language):
    with pytest.raises(InvalidArgumentError) as caught:
        sandbox.create_code_context(language=language.name, envs={"PATH": "/nowhere"})
    assert language.program in str(caught.value)
    assert "Debian package" in caught.value.hint and "python" in caught.value.hint


def test_languages_need_no_python_kernel(make, language):
    assert printed(make("plain").run_code(language.says, language=language.name)) == "again\n"


# -- bash


def test_bash_keeps_functions_options_aliases_and_the_last_status(sandbox):
    context = sandbox.create_code_context(language="bash")
    ok(sandbox.run_code("greet() { echo hello $1; }; shopt -s nullglob; alias two='echo 2'; cd /tmp; declare -A map=([a]=b)", context=context))
    text = printed(sandbox.run_code("greet you; shopt -q nullglob && echo set; two; pwd; echo ${map[a]}", context=context))
    assert text == "hello you\nset\n2\n/tmp\nb\n"
    assert sandbox.run_code("(exit 7)", context=context).error.value == "exit status 7"
    assert printed(sandbox.run_code("echo $?", context=context)) == "7\n"
    sandbox.remove_code_context(context)


@pytest.mark.parametrize("code", ["echo ${unset_one:?missing}", "set -u; echo $unset_one", "echo $((1 / 0))", "break", "return 3", "readonly x=1; x=2"])
def test_bash_survives_what_ends_a_script(sandbox, code):
    context = sandbox.create_code_context(language="bash")
    ok(sandbox.run_code("kept=21", context=context))
    sandbox.run_code(code, context=context)
    assert printed(sandbox.run_code("set +u; echo $kept", context=context)) == "21\n"
    sandbox.remove_code_context(context)


def test_bash_with_errexit_takes_no_notice_of_what_a_condition_says(sandbox):
    context = sandbox.create_code_context(language="bash")
    ok(sandbox.run_code("set -euo pipefail; kept=21", context=context))
    sandbox.run_code("[ -e /nowhere ] && echo there", context=context)
    assert printed(sandbox.run_code("echo $kept", context=context)) == "21\n"
    assert sandbox.run_code("false; echo not reached", context=context).error.name == "KernelDiedError"
    sandbox.remove_code_context(context)


def test_bash_code_is_taken_byte_for_byte(sandbox):
    code = "cat <<'END'\n\\ ' \" $x `y` !z \t% é\nEND\nprintf '%s|' \"it's\" '\\n' a\\\\b"
    assert printed(sandbox.run_code(code, language="bash")) == "\\ ' \" $x `y` !z \t% é\nit's|\\n|a\\\\b|".replace("a\\\\b", "a\\b")


# -- JavaScript


@pytest.fixture
def js(sandbox):
    need(JAVASCRIPT)
    context = sandbox.create_code_context(language="javascript")
    yield lambda code, **more: sandbox.run_code(code, context=context, **more)
    sandbox.remove_code_context(context)


def test_javascript_declares_again_awaits_and_imports_at_the_top_level(js):
    ok(js("const a = 1; let b = 2; class C { c = 3 }"))
    assert ok(js("const a = 10; class C { c = 30 }\na + b + new C().c")).text == "42"
    assert ok(js("await new Promise((resolve) => setTimeout(() => resolve(7), 20))")).text == "7"
    code = "import fs, {readFileSync as read} from 'node:fs'\nimport * as path from 'path'\n[read === fs.readFileSync, path.join('a', 'b')]"
    assert ok(js(code)).results[0].json == [True, "a/b"]
    assert ok(js("(await import('node:os')).EOL.length")).text == "1"
    assert ok(js("`import('x') ${(await import('os')).EOL.length} ` + /import('y')/.source")).text == "import('x') 1 import('y')"


def test_javascript_imports_modules_beside_it(sandbox, js):
    sandbox.files.write("/home/user/law.mjs", "export default 1; export const two = 2\n")
    assert ok(js("import one, { two } from './law.mjs'\none + two")).text == "3"
    sandbox.files.write("/home/user/law.cjs", "exports.three = 3\n")
    assert ok(js("require('./law.cjs').three")).text == "3"


@pytest.mark.parametrize(
    ("code", "field", "expected"),
    [
        ("display.html('<b>h</b>')", "html", "<b>h</b>"),
        ("display.markdown('**m**')", "markdown", "**m**"),
        ("display.svg('<svg/>')", "svg", "<svg/>"),
        ("display.latex('$x$')", "latex", "$x$"),
        ("display.json({a: [1, 2]})", "json", {"a": [1, 2]}),
        ("display({a: [1, null]})", "json", {"a": [1, None]}),
        ("display({[Symbol.for('Jupyter.display')]: () => ({'text/html': '<i>'})})", "html", "<i>"),
    ],
)
def test_javascript_shows_rich_results(js, code, field, expected):
    result = ok(js(code)).results[0]
    assert getattr(result, field) == expected and not result.is_main_result


def test_javascript_buffers_are_the_pictures_that_they_hold(js):
    result = ok(js("Buffer.concat([Buffer.from('89504e470d0a1a0a', 'hex'), Buffer.from([...Array(256).keys()])])")).results[0]
    assert result.is_main_result and base64.b64decode(result.png) == b"\x89PNG\r\n\x1a\n" + bytes(range(256))


def test_javascript_gives_the_last_value_as_text_and_json(js):
    result = ok(js("({a: 1, b: ['x']})")).results[0]
    assert result.is_main_result and result.text == "{ a: 1, b: [ 'x' ] }" and result.json == {"a": 1, "b": ["x"]}
    assert ok(js("{a: 1}")).results[0].json == {"a": 1}
    assert ok(js("undefined")).results == [] and ok(js("new Map([[1, 2]])")).text == "Map(1) { 1 => 2 }"


def test_javascript_errors_in_a_timer_or_a_forgotten_promise_end_nothing(js):
    ok(js("kept = 1; setTimeout(() => { throw new Error('late') }, 1); Promise.reject(new Error('forgotten')); 0"))
    execution = js("await new Promise((resolve) => setTimeout(resolve, 200)); kept")
    assert ok(execution).text == "1"


# -- R


@pytest.fixture
def r(sandbox):
    need(RLANG)
    context = sandbox.create_code_context(language="r")
    yield lambda code, **more: sandbox.run_code(code, context=context, **more)
    sandbox.remove_code_context(context)


def test_r_prints_visible_values_and_gives_the_last_one(r):
    execution = ok(r("1:2\ninvisible(3)\nx <- 4\nx"))
    assert printed(execution) == "[1] 1 2\n" and execution.text == "[1] 4"
    assert ok(r("invisible(1)")).results == []


def test_r_plots_come_out_as_pictures(r):
    execution = ok(r("plot(1:3); hist(c(1, 2, 2)); 5"))
    pictures = [result for result in execution.results if result.png]
    assert len(pictures) == 2 and all(picture.png_bytes().startswith(b"\x89PNG") for picture in pictures)
    assert execution.text == "[1] 5"
    assert [result for result in ok(r("1")).results if result.png] == []


def test_r_data_frames_come_out_as_text_html_and_data(r):
    result = ok(r("data.frame(city = c('Ulm', 'B<'), size = c(1.5, NA), day = as.Date(c('2024-01-02', NA)), big = c(TRUE, FALSE))")).results[-1]
    assert "Ulm" in result.text and "<table" in result.html and "B&lt;" in result.html
    assert result.data == {"city": ["Ulm", "B<"], "size": [1.5, None], "day": ["2024-01-02", None], "big": [True, False]}


def test_r_warnings_and_messages_go_to_stderr(r):
    execution = ok(r("log(-1); message('said')"))
    assert "NaNs produced" in "".join(execution.logs.stderr) and "said" in "".join(execution.logs.stderr)


# -- all of them


@pytest.mark.parametrize("name", [BASH.name])
def test_a_context_made_for_one_language_refuses_another(sandbox, name):
    context = sandbox.create_code_context(language=name)
    with pytest.raises(InvalidArgumentError):
        sandbox.run_code("1", context=context, language="python")
    sandbox.remove_code_context(context)
