"""Spans around calls, in programs that trace with OpenTelemetry. Without it there are none."""
