"""Every tensor argument of every public function under every machinery of torch: one cell each, decided by running it.

formulas.py   what the functions compute, in plain PyTorch
entries.py    the functions, a right call of each, and their tensor arguments
oracle.py     values, Jacobians and Hessians of the formulas in float64
cells.py      one argument of one function on one backend; how results are judged
outcomes.py   right, refused, wrong, raw or crashed
derivatives.py, batches.py, graphs.py, compilers.py, execution.py   the machineries, one small function each
table.py      all machineries and all cells
page.py       the table as a page: ``python -m tests.machinery --write docs/machinery.md``
"""
