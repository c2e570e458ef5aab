"""A stand-in for a replica: SGLang's HTTP surface, with times from a recorded curve."""
