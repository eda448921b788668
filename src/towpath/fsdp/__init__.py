"""Towpath's transfers under FSDP2 and DDP, which keep everything else: `towpath.wires` and a hook for DDP."""
