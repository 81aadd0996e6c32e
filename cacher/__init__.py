"""The Oracle Cacher: reads the data, looks ahead, plans, and hands every trainer its steps.

data.loader ──Batch──> oracle.planner ──CachePlan──> planning.PlannedData ──Step──> service ──frames──> trainer
                                                                            (its own process: embedded)
"""
