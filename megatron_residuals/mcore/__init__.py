# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The adapter to Megatron-Core.

spec                  from the specs a user has to specs whose layers carry a residual state
layer, block          the host's layer and block with that state between sublayers
hybrid                the stack of a hybrid model, whose layers are one sublayer each
runner                runs the sublayers of a stage, with checkpoints where the policy puts them
stage_io              the edge of a stage: payload and held sources in, and out
route, communicator   the way of a micro-batch through the pipeline; the host's schedules
support               what cannot be combined with a replaced residual, refused
arguments             the configuration as flags of Megatron's command line
install, compose      the named seams: where we come into the host, and out of it again; what a
                      block with a residual is composed of
compat, symbols       what differs between releases; every symbol of the host that we use
training/             what surrounds the model in a training run

``checkpoint``, ``warm_start``, ``optimizer`` and ``monitor`` here are the public names of what
users call of ``training/``.
"""
