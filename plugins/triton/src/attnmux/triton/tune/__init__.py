"""The tuner of launch configurations, and the kernels compiled before the first request."""
