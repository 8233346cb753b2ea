"""Measurements that print a table: ratios taken in one run, with the machine, the versions and the commit."""
