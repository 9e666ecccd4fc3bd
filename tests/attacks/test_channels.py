"""Forgery: no thread, child or byte of one execution ends another, or speaks in its name."""

from __future__ import annotations

import pytest
from arena import assert_answers

FORGER = '''
import json, os, socket, struct, sys, threading

def forge(number):
    """Waits for the next request on the control socket and answers in the kernel's place."""
    control = socket.socket(fileno=os.dup(number))
    control.setblocking(True)
    piece = control.recv(65536, socket.MSG_PEEK)
    size = struct.unpack("!I", piece[:4])[0]
    message = json.loads(piece[4:4 + size])
    os.write(os.open("/tmp/peeked", os.O_CREAT | os.O_WRONLY, 0o644), json.dumps(message).encode())
    for key in ("token", "nonce"):
        secret = bytes.fromhex(message.get(key, "00" * 16))
        result = json.dumps({"data": {"text/plain": "FORGED"}, "main": True, "metadata": {}}).encode()
        done = b'{"status": "ok", "execution_count": 77}'
        control.sendall(struct.pack("!IB16s", len(result), 1, secret) + result)
        control.sendall(struct.pack("!IB16s", len(done), 3, secret) + done)

sockets = [int(name) for name in os.listdir("/proc/self/fd") if os.path.lexists("/proc/self/fd/" + name) and os.readlink("/proc/self/fd/" + name).startswith("socket:")]
'''


@pytest.mark.parametrize("by", ["thread", "child", "program"])
def test_an_earlier_cell_cannot_answer_for_a_later_one(make, by):
    box = make()
    start = {
        "thread": "threading.Thread(target=forge, args=(sockets[0],), daemon=True).start()",
        "child": "held = os.dup(sockets[0])\nif os.fork() == 0:\n    try: forge(held)\n    finally: os._exit(0)",
        "program": "import subprocess\nheld = os.dup(sockets[0]); os.set_inheritable(held, True)\nsubprocess.Popen([sys.executable, '/tmp/forger.py', str(held)], pass_fds=[held], start_new_session=True); None",
    }[by]
    box.files.write("/tmp/forger.py", FORGER + "\nforge(int(sys.argv[1]))\n")
    assert box.run_code(FORGER + start + "\nlen(sockets)").error is None
    peeked = False
    for turn in range(20):
        execution = box.run_code(f"import time; time.sleep(0.02); {turn} + 1000", timeout=10)
        assert execution.text == str(turn + 1000), execution
        assert execution.execution_count != 77
        peeked = peeked or box.files.exists("/tmp/peeked")
        if peeked and turn > 3:
            break
    # The control: where the forger came first it did read the request, so only the token stood in its way.
    assert peeked or by != "thread"


def test_messages_with_guessed_and_old_tokens_are_dropped(make):
    box = make()
    code = FORGER + '''
for secret in [bytes(16), b"\\xff" * 16, *(os.urandom(16) for _ in range(50))]:
    for kind in (1, 2, 3, 4, 0, 255):
        os.write(sockets[0], struct.pack("!IB16s", 2, kind, secret) + b"{}")
6 * 7
'''
    execution = box.run_code(code, timeout=10)
    assert execution.text == "42" and len(execution.results) == 1 and execution.error is None
    assert_answers(box)


def test_a_message_that_claims_gigabytes_costs_its_own_kernel_only(make, neighbour):
    box = make()
    before = box.run_code("import os; os.getpid()").text
    try:
        box.run_code(FORGER + 'os.write(sockets[0], struct.pack("!IB16s", 0xFFFFFFFF, 1, bytes(16)))', timeout=2)
    except TimeoutError:
        pass
    assert box.run_code("import os; os.getpid()").text != before
    assert_answers(box)


def test_descriptors_sent_to_the_agent_are_not_kept(make):
    box = make()
    code = FORGER + '''
control = socket.socket(fileno=os.dup(sockets[0]))
for _ in range(300):
    try: socket.send_fds(control, [struct.pack("!IB16s", 0, 1, bytes(16))], [os.open("/dev/null", 0)] * 20)
    except OSError: break
'''
    box.run_code(code, timeout=10)
    assert_answers(box)


@pytest.mark.parametrize(
    "ending",
    ["os._exit(3)", "os.kill(os.getpid(), 9)", "os.closerange(0, 2000)", "ctypes.string_at(0)", "os.execv('/bin/true', ['true'])", "os.abort()", "[os.close(number) for number in sockets]"],
)
def test_a_kernel_that_ends_itself_ends_nothing_else(make, ending):
    box = make()
    other = box.create_code_context()
    box.run_code("kept = 5", context=other)
    execution = box.run_code(FORGER + "import ctypes\n" + ending, timeout=10)
    assert execution.error is not None
    assert box.run_code("kept", context=other).text == "5"
    assert_answers(box)


def test_contexts_cannot_read_each_others_memory(make):
    box = make()
    other = box.create_code_context()
    pid = box.run_code("import os; os.getpid()", context=other).text
    code = f"""
answers = []
for name in ("mem", "environ", "maps", "fd/1", "fd/1000", "exe", "cwd"):
    try: open("/proc/{pid}/" + name, "rb"); answers.append(name)
    except OSError: pass
answers
"""
    assert box.run_code(code).text == "[]"


def test_a_closed_or_replaced_output_is_restored(make):
    box = make()
    box.run_code("import os, sys\nos.close(1); os.close(2); sys.stdout = None; sys.stderr = open('/dev/null', 'w'); del __builtins__.print")
    execution = box.run_code("import os; os.write(1, b'back\\n'); 1")
    assert execution.text == "1" and "".join(execution.logs.stdout) == "back\n"
