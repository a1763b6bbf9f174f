"""The worker side of offloading: handlers that move bytes, and the worker that routes to them."""
