"""Figures for Prometheus, read when it scrapes."""
