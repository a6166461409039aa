"""Sizing a pool before it is bought: capacity, step time and simulated throughput of layouts."""
