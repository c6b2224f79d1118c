# SPDX-License-Identifier: MIT OR Apache-2.0
"""A journal run again in one process, and what two runs of the same commands differ in.

replaying    a journal and the ranks of here: the same tokens and digests, or the first difference
journal_bisecting, configuration_bisecting    two journals, or one under two configurations: where they part
listing      what a journal says
settings · ranks · requests · player · comparison · parting · names   their parts
"""

from metrale_ray.replay.configuration_bisecting import bisect_configurations as bisect_configurations
from metrale_ray.replay.journal_bisecting import bisect_journals as bisect_journals
from metrale_ray.replay.replaying import ReplayResult as ReplayResult
from metrale_ray.replay.replaying import replay_journal as replay_journal
from metrale_ray.replay.settings import replay_config as replay_config
