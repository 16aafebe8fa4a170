"""Functions that other processes of the tests call: some are wrong, hang, or crash."""

import os
import sys
import time

from jfp8.command_line.child import compiled


def doubled(x):
    print("a library says something")
    return 2 * x


def raises(x):
    raise ValueError(f"no {x} here")


def hangs_at_once(_):
    time.sleep(1000)


def hangs_in_a_kernel(_):
    compiled()
    time.sleep(1000)


def crashes(_):
    print("the driver says goodbye", file=sys.stderr, flush=True)
    os.abort()
