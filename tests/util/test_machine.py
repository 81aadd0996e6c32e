from bagpipe.util.machine import machine_facts


def test_every_fact_is_told() -> None:
    facts = machine_facts()
    assert int(facts["cores"]) >= 1
    assert all(facts.values())
