"""HAMi's and HAMi-core's forms: annotations and the shared region."""
