"""Figures of the course. They draw what they are given and teach nothing by themselves."""
