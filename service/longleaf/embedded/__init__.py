"""The engine that runs anywhere: tiny MLA + MoE target, DFlash drafter, scheduler, server."""
