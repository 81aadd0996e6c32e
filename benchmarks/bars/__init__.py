"""Does bagpipe's trainer give the scores of FuxiCTR, on the same examples and the same models?

prepare        Criteo's click logs ──> one split in both formats, with the same ids and numbers
settings       models, optimizers and seeds, as both systems are told
ours, fuxictr  one run ──> Outcome, in processes of their own; fuxictr_trial runs in an interpreter with FuxiCTR
same_start     initial values and batches of a job of ours, for FuxiCTR's model
journal        outcomes of all runs, one a line: a benchmark that was stopped goes on
main, report   parts, tables
recipes        configurations for BARS' Criteo_x1, Criteo_x4 and Frappe_x1
"""
