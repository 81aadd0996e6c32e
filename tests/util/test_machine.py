from bagpipe.util.machine import machine_facts, processor_vendor, vector_instructions


def test_machine_facts() -> None:
    facts = machine_facts()
    assert int(facts["cores"]) >= 1
    assert all(facts.values())


def test_vector_instructions_are_a_sorted_set() -> None:
    names = vector_instructions().split()
    assert names == sorted(set(names))
    assert "smep" not in names  # protects the kernel's memory
    assert processor_vendor()
