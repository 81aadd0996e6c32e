"""HTML reports: one file that loads nothing, for the replay of a log and for sweeps of forecasts.

charts   Chart: figures as plain data, one per choice of the reader ──┐
tables   records ──Column──> sortable HTML tables                     ├─page──> HTML with report.css, report.js, plotly
                              sections of HTML ───────────────────────┘
"""
