"""multiq in other libraries. Each library has a module here, and an extra of the same name. The core imports none of
these modules."""
