# SPDX-License-Identifier: MIT OR Apache-2.0
"""A journal run again in one process, and what two runs of the same commands differ in.

replaying    a journal and the ranks of here: the same tokens and digests, or the first difference
journal_bisecting, configuration_bisecting    two journals, or one under two configurations: where they part
listing      what a journal says
settings · ranks · requests · player · comparison · parting · names   their parts

What reads a journal and computes nothing (`journal_bisecting`, `listing`) imports no torch.
"""
