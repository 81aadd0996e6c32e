"""Small helpers without a subject of their own: environment check, output files, failpoints."""
