# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What surrounds the model in a training run.

reading                        a launch as the host reads it, ahead of the run
forecast, passed_over          its arguments in the planner's terms; what they leave out of account
startup                        what a run prints when its model is built
checkpoint                     the record of a residual in checkpoints, compared before they load
warm_start                     training that starts from the weights of a plain model
optimizer, mixed_precision     parameter groups of the mechanism; groups of mixed precision
monitor                        records steps; Megatron's loop says when one is over
publish                        from a record to files, wandb and TensorBoard
script                         what the runner wraps for scripts as they are
"""
