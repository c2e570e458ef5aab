"""The engine that runs anywhere: tiny MLA + MoE target, DFlash drafter, KV pool, scheduler, server."""
