"""For operators: metrics, traces, logs and the dashboard."""
