"""What each law of code contexts says in bash, JavaScript and R: one row a language, for `test_language_contexts.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Spoken:
    """Code in one language; what it prints or gives is what the name says, in every language the same."""

    name: str
    program: str
    keep: str  # a variable `kept` of 21
    tell: str  # prints `kept` times 2
    gone: str  # prints "gone" when `kept` is not there
    both: str  # prints out to stdout and err to stderr
    where: str  # prints the working directory and the variable RF_OWN, or "none"
    fails: tuple[str, str, str]  # code, the error's name, a part of its traceback
    broken: tuple[str, str]  # code that does not parse, the error's name
    spins: str  # prints begun, then never ends
    sleeps: str  # waits for a minute without computing
    stubborn: str  # never ends and takes no notice of an interrupt
    leaves: str  # ends the interpreter with code 3
    crashes: tuple[str, str]  # dies of a signal, its name
    spoils: tuple[str, ...]  # closes or redirects fd 1
    says: str  # prints again
    reads: str  # reads standard input to its end and prints how much it was
    child: str  # a background child that holds the output open for a minute
    descriptors: str  # prints what a child has open
    late: str  # something that speaks half a second after its cell
    waits: str  # waits for a second, then prints mine
    forges: str  # writes the text %s to what it finds of the driver's own channel
    eats: str  # memory without end
    floods: str  # prints 4 MiB and then last


BASH = Spoken(
    name="bash", program="bash",
    keep="kept=21", tell="echo $((kept * 2))", gone="echo ${kept-gone}",
    both="echo out; echo err >&2",
    where='echo "$PWD ${RF_OWN-none}"',
    fails=("nosuchcommand", "ExitStatusError", "127"),
    broken=("echo fine; if true; then\n", "SyntaxError"),
    spins="echo begun; while :; do :; done", sleeps="sleep 60",
    stubborn="trap '' INT; while :; do :; done",
    leaves="exit 3", crashes=("kill -SEGV $$", "SIGSEGV"),
    spoils=("exec >&-", "exec >/dev/null"), says="echo again",
    reads="wc -c",
    child="sleep 60 &", descriptors="ls /proc/self/fd",
    late="(sleep 0.5; echo straggler) &", waits="sleep 1; echo mine",
    forges='for d in /proc/$$/fd/*; do [[ $(readlink $d) == *messages* ]] && printf %s >&${d##*/}; done',
    eats="x=$(head -c 400000000 /dev/zero | tr '\\0' x)",
    floods="head -c 4194304 /dev/zero | tr '\\0' x; echo; echo last",
)  # fmt: skip

JAVASCRIPT = Spoken(
    name="javascript", program="node",
    keep="const kept = 21", tell="console.log(kept * 2)", gone="console.log(typeof kept === 'undefined' ? 'gone' : kept)",
    both="console.log('out'); console.error('err')",
    where="console.log(process.cwd(), process.env.RF_OWN ?? 'none')",
    fails=("function divide(x) { return x.no.such }\ndivide(1)", "TypeError", "divide"),
    broken=("let x = ;", "SyntaxError"),
    spins="console.log('begun'); while (true) {}", sleeps="await new Promise((resolve) => setTimeout(resolve, 60000))",
    stubborn="await null; for (;;) {}",
    leaves="process.exit(3)", crashes=("process.abort()", "SIGABRT"),
    spoils=(
        "require('fs').closeSync(1)",
        "require('fs').closeSync(1); require('fs').openSync('/dev/null', 'w')",
        "process.stdout.end()",
    ),
    says="console.log('again')",
    reads="console.log(require('fs').readFileSync(0).length)",
    child="require('child_process').spawn('sleep', ['60'], {stdio: 'inherit'}); 1",
    descriptors="console.log(require('child_process').spawnSync('ls', ['/proc/self/fd'], {stdio: ['ignore', 'pipe', 'ignore']}).stdout.toString())",
    late="setTimeout(() => { console.log('straggler'); display('straggler') }, 500); 0",
    waits="await new Promise((resolve) => setTimeout(resolve, 1000)); console.log('mine')",
    forges="for (const n of require('fs').readdirSync('/proc/self/fd')) try { if (require('fs').readlinkSync('/proc/self/fd/' + n)"
           ".includes('messages')) require('fs').writeSync(+n, %s) } catch {}\n0",
    eats="const eaten = []; for (;;) eaten.push(Buffer.alloc(1 << 24, 1))",
    floods="console.log('x'.repeat(1 << 22)); console.log('last')",
)  # fmt: skip

R = Spoken(
    name="r", program="R",
    keep="kept <- 21", tell="cat(kept * 2, '\\n')", gone="cat(if (exists('kept')) kept else 'gone', '\\n')",
    both="cat('out\\n'); message('err')",
    where="cat(getwd(), Sys.getenv('RF_OWN', 'none'), '\\n')",
    fails=("divide <- function(x) stop('cannot')\ndivide(1)", "simpleError", "divide(1)"),
    broken=("x <- (1 +", "SyntaxError"),
    spins="cat('begun\\n'); while (TRUE) {}", sleeps="Sys.sleep(60)",
    stubborn="system(\"trap '' INT; sleep 60\")",
    leaves="quit(status = 3)", crashes=("tools::pskill(Sys.getpid(), 11); Sys.sleep(60)", "SIGSEGV"),
    spoils=("sink('/dev/null')", "sink('/dev/null'); closeAllConnections()"), says="cat('again\\n')",
    reads="cat(sum(nchar(readLines(file('stdin')))), '\\n')",
    child="system('sleep 60 &')", descriptors="cat(system('ls /proc/self/fd', intern = TRUE), sep = '\\n')",
    late="system('(sleep 0.5; echo straggler) &')", waits="Sys.sleep(1); cat('mine\\n')",
    forges="for (n in list.files('/proc/self/fd', full.names = TRUE)) if (grepl('messages', Sys.readlink(n))) "
           "cat(%s, file = n)\ninvisible()",
    eats="eaten <- raw(6e8); eaten[] <- as.raw(1)",
    floods="cat(strrep('x', 4194304), '\\n'); cat('last\\n')",
)  # fmt: skip

ALL = (BASH, JAVASCRIPT, R)
