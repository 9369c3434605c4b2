"""Imports what ranks and programs of the tests need, in the process that they are forked from."""

import gc

import pytest  # noqa: F401 - of the files of tests
import sentencepiece  # noqa: F401 - what programs import where they use it
import tokenizers  # noqa: F401
import torch._dynamo  # noqa: F401 - torch itself does at the first step, for most of two seconds

import megatron_zpp.commands.evaluate
import megatron_zpp.commands.sample  # noqa: F401
import pretrain_gpt  # noqa: F401

gc.freeze()  # a fork then need not copy what its collector would only look at
