"""The process that tests fork their ranks from. A test run has one: it imports what any of them needs."""

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded"])
