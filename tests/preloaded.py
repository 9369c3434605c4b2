"""Imports what ranks and programs of the tests need, in the process that they are forked from."""

import gc

import pytest  # noqa: F401 - of the files of tests
import sentencepiece  # noqa: F401 - what programs import where they use it
import tokenizers  # noqa: F401
import torch._dynamo  # noqa: F401 - torch itself does at the first step, for most of two seconds

import megatron_zpp.commands.evaluate
import megatron_zpp.commands.pretrain
import megatron_zpp.commands.sample
import megatron_zpp.config.legacy.translate
import megatron_zpp.model.parallel.layers
import megatron_zpp.ops.library
import megatron_zpp.train.dry_run  # with plan/
import megatron_zpp.train.resume.restore
import megatron_zpp.train.saving.saver
import megatron_zpp.train.setup.run_file  # noqa: F401

gc.freeze()  # a fork then need not copy what its collector would only look at
