from bagpipe.util.machine import machine_facts


def test_machine_facts() -> None:
    facts = machine_facts()
    assert int(facts["cores"]) >= 1
    assert all(facts.values())
