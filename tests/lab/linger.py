"""A script that ends only by force: it ignores every polite signal, and leaves a daemon that does so too.

python linger.py TOKEN [DAEMON]
"""

from __future__ import annotations

import signal
import subprocess
import sys

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
if len(sys.argv) == 2:
    subprocess.Popen([sys.executable, __file__, sys.argv[1], "daemon"], start_new_session=True)
else:
    sys.stdout.write("ready\n")  # at once: two nodes share the pipe
    sys.stdout.flush()
while True:
    signal.pause()
