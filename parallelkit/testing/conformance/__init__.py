"""The conformance suites: what every backend of parallelkit must do, as tests to subclass.

A plugin proves itself with an `Adapter` (see `adapter`) and four subclasses (see `suites`), run by
pytest. Each suite starts the plugin on real processes and reports part by part; a part whose
features the plugin does not claim is skipped, with the reason.
"""
