# SPDX-License-Identifier: MIT OR Apache-2.0
"""Requests of a file, answered into another file, in the format of OpenAI's batches; it needs the extra `serve`.

run          `run_batch`: all of it in one call
batch        `Batch`: both files and the work between them; contents what they hold
options      `BatchOptions`; tally counts, and `BatchSummary`; shown what a person sees
line         one line of INPUT; record one line of OUTPUT
input_file   reads INPUT; output_file keeps OUTPUT; key_table knows millions of keys
answering    one request, asked and answered as a service would; engine what is needed of a driver
"""

from metrale_ray.batch.batch import Batch, open_batch
from metrale_ray.batch.options import BatchOptions
from metrale_ray.batch.run import run_batch
from metrale_ray.batch.tally import BatchSummary

__all__ = ["Batch", "BatchOptions", "BatchSummary", "open_batch", "run_batch"]
