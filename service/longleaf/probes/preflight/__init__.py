"""``longleaf preflight``: can this node run the engine as it is configured?"""
