#!/bin/sh
# Convert train.csv, valid.csv and test.csv of a BARS dataset to .arrow files beside them.
#
#   benchmarks/bars/recipes/prepare.sh criteo_x1|criteo_x4|frappe_x1 FOLDER        from the root of the checkout
#
# Criteo_x4's strings become numbers: 1, 2, … for those that occur 10 times or more in train.csv, 0 for the others.
set -eu
dataset=$1
folder=$2
python=${PYTHON:-.venv/bin/python}
cp "$(dirname "$0")/$dataset/schema.toml" "$folder/schema.toml"
dictionaries=""
if [ "$dataset" = criteo_x4 ]; then dictionaries="--dictionaries frequency --min-count 10"; fi
for part in train valid test; do
    # $dictionaries is several words.
    "$python" -m data convert "$folder/$part.csv" "$folder/$part.arrow" --format csv --schema "$folder/schema.toml" $dictionaries
    dictionaries=""
done
