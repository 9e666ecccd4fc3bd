"""Ordinary use: what programs that mean no harm need, and what a filter that is too tight breaks."""

import ctypes
import os
import socket
import subprocess
import sys
import tempfile
import threading

from report import say

seen = []
threads = [threading.Thread(target=seen.append, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
say("threads", len(seen))
say("subprocess", subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True, check=True).stdout.strip())
pointer = ctypes.c_void_p()
say("getifaddrs", ctypes.CDLL(None).getifaddrs(ctypes.byref(pointer)))
server = socket.create_server(("127.0.0.1", 0))
with server, socket.create_connection(server.getsockname(), timeout=5) as client:
    other, _ = server.accept()
    other.sendall(b"own loopback")
    other.close()
    say("loopback", client.recv(100).decode())
with tempfile.TemporaryDirectory() as directory:
    path = os.path.join(directory, "file")
    with open(path, "w") as file:
        file.write("x")
    os.rename(path, path + "2")
    say("files", os.listdir(directory))
for path in ("/dev/stdout", "/dev/stderr"):
    with open(path, "a") as again:
        again.write("\n")
