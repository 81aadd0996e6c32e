"""Do reshardings over gloo take the time that the simulator says?

network   hosts of one rank each: network namespaces on a bridge, a token bucket in each direction
cases     the reshardings to measure
rank      one rank: calibration of the links, then every case, round by round
main      network, ranks ──> results.json, tables (Markdown)
"""
