"""Schedules as text, CSV, SVG and traces.

Program ──render.csv──> CSV            PyTorch's CSV <──torch_csv──> Program
Program ──version_text──> table of weight versions          text ──cost_text──> costs of the simulator
Placement ──placement_text──> what fits into gaps, as text and JSON
orders that lanes chose <──order_text──> text
Simulation ──render──> grid, SVG (drawing, legend), JSON, Perfetto trace (spans)
"""
