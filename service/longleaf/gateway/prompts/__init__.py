"""Request bodies: parsed, checked, and counted in tokens, long ones in processes of their own."""
