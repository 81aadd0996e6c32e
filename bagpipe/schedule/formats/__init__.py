"""Schedules as text, CSV, SVG and traces.

Program ──render.csv──> CSV            PyTorch's CSV <──torch_csv──> Program
Program ──version_text──> table of weight versions
Simulation ──render──> grid, SVG (drawing, legend), JSON, Perfetto trace (spans)
"""
