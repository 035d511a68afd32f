"""The topics of the contract. Each topic is a module with one class. Each test checks one behaviour."""
