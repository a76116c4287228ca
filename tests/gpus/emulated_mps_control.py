"""An EMULATION of nvidia-cuda-mps-control: the language of its daemon, and no GPU.

Installed under that name by ``tests.gpus.programs``. ``-f`` and ``-d`` start a daemon that listens
in CUDA_MPS_PIPE_DIRECTORY; without a flag, orders come on standard input. Every process that was
given this pipe directory and a thread percentage counts as a client, since only workers are. What
is ordered is kept in ``orders`` in the log directory. A file EMULATED_MPS beside this program makes
it misbehave, by one of these words: refuse, refuse-f, hang, fault.
"""

import os
import signal
import socket
import sys
import time

PIPE = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
LOG = os.environ.get("CUDA_MPS_LOG_DIRECTORY", PIPE)
PID_FILE = os.path.join(PIPE, "nvidia-cuda-mps-control.pid")
SOCKET = os.path.join(PIPE, "control")


def mode():
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "EMULATED_MPS")) as file:
        return file.read().strip()


def main():
    flags = sys.argv[1:]
    if not flags:
        return ask(sys.stdin.read())
    if mode() == "refuse" or (mode() == "refuse-f" and "-f" in flags):
        print("EMULATED: an option is refused:", *flags)
        return 1
    if "-d" in flags:
        if os.fork():
            while not os.path.exists(PID_FILE):
                time.sleep(0.005)
            return 0
        os.setsid()
    return Daemon().serve()


def ask(orders):
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(SOCKET)
        except OSError:
            print("EMULATED: Cannot find MPS control daemon process", file=sys.stderr)
            return 1
        connection.sendall(orders.encode())
        connection.shutdown(socket.SHUT_WR)
        while answer := connection.recv(4096):
            sys.stdout.write(answer.decode())
    return 0


class Daemon:
    def __init__(self):
        self.percentage = "100.0"
        self.server = 0

    def serve(self):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(SOCKET)
        listener.listen()
        with open(PID_FILE + ".new", "w") as file:
            file.write(str(os.getpid()))
        os.rename(PID_FILE + ".new", PID_FILE)
        going = True
        while going:
            connection, _ = listener.accept()
            with connection:
                orders = b""
                while part := connection.recv(4096):
                    orders += part
                if mode() == "hang":
                    time.sleep(60)
                for order in orders.decode().splitlines():
                    going = going and self.obey(order.split(), connection)
        if self.server:
            os.kill(self.server, signal.SIGKILL)
            os.waitpid(self.server, 0)
        os.unlink(SOCKET)
        os.unlink(PID_FILE)
        return 0

    def obey(self, words, connection):
        with open(os.path.join(LOG, "orders"), "a") as file:
            file.write(" ".join(words) + "\n")
        order, *arguments = words
        answer = getattr(self, "on_" + order, lambda *_: None)(*arguments)
        if answer is not None:
            connection.sendall((answer + "\n").encode())
        return order != "quit"

    def on_get_default_active_thread_percentage(self):
        return self.percentage

    def on_set_default_active_thread_percentage(self, percentage):
        self.percentage = percentage + ".0"
        return self.percentage

    def on_get_server_list(self):
        """A server comes with the first client, and stays."""
        if not self.server and clients():
            self.server = os.fork()
            if not self.server:
                os.closerange(3, 64)  # whoever asks waits for the end of what they read
                while True:
                    time.sleep(60)
        return str(self.server) if self.server else None

    def on_get_client_list(self, server):
        return "\n".join(map(str, clients())) or None

    def on_get_server_status(self, server):
        return "FAULT" if mode() == "fault" else "ACTIVE"

    def on_terminate_client(self, server, client):
        ours = int(server) == self.server and int(client) in clients()
        return None if ours else "EMULATED: failed to terminate"


def clients():
    """Every process that was told of this daemon as a worker is."""
    found = []
    ours = b"CUDA_MPS_PIPE_DIRECTORY=" + PIPE.encode()
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                variables = file.read().split(b"\0")
        except OSError:
            continue
        limited = any(v.startswith(b"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=") for v in variables)
        if ours in variables and limited and name.isdigit():
            found.append(int(name))
    return found


sys.exit(main())
