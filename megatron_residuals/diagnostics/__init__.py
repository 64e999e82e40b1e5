# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What the mechanism does during training, observed from outside the model.

metric, catalogue           every metric: its axis, its healthy range, what to do outside it
fields                      the one flat vector of sums that a step leaves on every rank
tokens, probes, statistics  what is taken from a sublayer, and the sums made of it
recorder, kept              hooks of a recorded step, taken off again behind it
optimizer_steps             whether anybody ends that step
records                     from the summed vector to named figures
journal                     the JSON lines file: written in the run, read by the report
sinks, heatmap              wandb and TensorBoard
panels, page                the report
"""
