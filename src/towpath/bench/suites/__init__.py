"""The suites of `towpath bench`: a list of cases each. A case measures itself."""
