# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""One module per subcommand of the `megatron-residuals` console command."""
