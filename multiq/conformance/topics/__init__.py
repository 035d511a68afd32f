"""The topics of the contract: one module per verb or theme, one class each, one behaviour per test."""
