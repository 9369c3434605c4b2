"""The process that tests fork their ranks from. A test run has one: it imports what any of them needs."""

import multiprocessing
import os

# Forked ranks have torch imported already, so pretrain_gpt.py sets this too late for them.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded"])
