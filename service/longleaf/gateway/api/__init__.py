"""HTTP surface: routes, request bodies, answers and errors."""
