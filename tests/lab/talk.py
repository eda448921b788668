"""Rank 1 answers a test over two pipes: may a byte pass to rank 0 and back? It says yes or no.

python talk.py QUESTIONS ANSWERS     a question is the seconds to wait for the byte
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

PORT = 6000

if os.environ["RANK"] == "0":
    with socket.create_server((os.environ["MASTER_ADDR"], PORT)) as server:
        connection, _ = server.accept()
        while byte := connection.recv(1):
            connection.sendall(byte)
elif os.environ["RANK"] == "1":
    connection = None
    while connection is None:
        with suppress(ConnectionRefusedError):
            connection = socket.create_connection((os.environ["MASTER_ADDR"], PORT))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with Path(sys.argv[1]).open() as questions, Path(sys.argv[2]).open("w") as answers:
        for question in questions:
            connection.settimeout(float(question))
            try:
                connection.sendall(b".")
                answer = "yes" if connection.recv(1) else "gone"
            except TimeoutError:
                answer = "no"
            print(answer, file=answers, flush=True)
